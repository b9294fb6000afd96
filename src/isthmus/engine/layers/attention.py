"""Causal self-attention over packed samples ("thd"), without padding and without a [T, T] mask."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.layers.dropout import AttentionDropout
from isthmus.engine.layers.norm import ProjectionNorm
from isthmus.engine.layers.packed_attention_cpu import check_shapes, packed_attention
from isthmus.engine.layers.rope import rotate
from isthmus.engine.parallel.context_parallel import Spans, gather_sequence
from isthmus.families.architecture import Architecture


def sdpa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    window: int | None = None,
    *,
    scale: float | None = None,
    spans: Spans | None = None,
    dropout: AttentionDropout | None = None,
) -> Tensor:
    """Attend causally within each sample with PyTorch's kernel, one sample after the other.

    Like :func:`packed_attention`, without logit soft-capping and attention sinks.
    """
    from torch.nn.attention.bias import causal_lower_right  # imports the compiler

    check_shapes(q, k, lengths, spans)
    outputs, offset = [], 0
    dropout_p = 0.0 if dropout is None else dropout.seed_kernels()
    for start, end, first in _query_ranges(lengths, window, spans):
        queries, keys = end - start, end - first
        mask = None
        if window is not None and keys > window:
            mask = _window_mask(queries, keys, window, q.device)
        elif keys > queries:
            mask = causal_lower_right(queries, keys)  # the last query sees all keys
        out = scaled_dot_product_attention(
            q[offset : offset + queries].flatten(1, 2).transpose(0, 1)[None],
            k[first:end].transpose(0, 1)[None],
            v[first:end].transpose(0, 1)[None],
            attn_mask=mask,
            dropout_p=dropout_p,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.size(2) > 1,
        )
        outputs.append(out[0].transpose(0, 1))
        offset += queries
    return torch.cat(outputs).unflatten(1, q.shape[1:3])


def _query_ranges(lengths: tuple[int, ...], window: int | None, spans: Spans | None) -> Iterator[tuple[int, int, int]]:
    """(start, end, first): queries [start, end) of one sample attend to keys [first, end).

    With a window the ranges are short, so masks grow with the window and not with the sample.
    """
    ends = list(accumulate(lengths))
    for span_start, span_end in ((0, ends[-1]),) if spans is None else spans:
        for length, sample_end in zip(lengths, ends, strict=True):
            sample = sample_end - length
            start, end = max(sample, span_start), min(sample_end, span_end)
            if start >= end:
                continue
            if window is None or end - sample <= window:
                yield start, end, sample
                continue
            for at in range(start, end, window):
                yield at, min(at + window, end), max(sample, at - window + 1)


def _window_mask(queries: int, keys: int, window: int, device: torch.device) -> Tensor:
    """True where a query attends: its own key and the ``window - 1`` before. The last key belongs to the last query."""
    index = torch.arange(keys, device=device)
    distance = index[keys - queries :, None] - index[None, :]
    return (distance >= 0) & (distance < window)


class VarlenAttention(nn.Module):
    """Softmax attention within each sample; grouped query heads share key/value heads without copies."""

    def __init__(
        self,
        config: Any,
        layer_number: int = 1,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        pg_collection: Any = None,
        **_kwargs: Any,
    ) -> None:
        super().__init__()
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if windowed else None
        self.scale = softmax_scale
        self.softcap = softcap
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            heads = config.num_attention_heads // pg_collection.tp.size()
            self.softmax_offset = nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
            tensor_parallel.set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)
        self.layer_number = layer_number
        self.dropout_rate = config.attention_dropout
        self.recomputed = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules

    def forward(self, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> Tensor:
        """q [T, G, R, D] (T / cp under context parallelism), k [T, G, D], v [T, G, Dv] -> [T, G * R * Dv].

        Keys and values are those of the whole packed sequence, or of this rank's tokens under context parallelism.
        """
        if self.recomputed and self.training:
            attended = tensor_parallel.checkpoint(lambda q, k, v: self.attend(q, k, v, batch), False, q, k, v)
            return attended
        return self.attend(q, k, v, batch)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, batch: PackedBatch) -> Tensor:
        """:meth:`forward` without recomputation."""
        if batch.spans is not None and k.size(0) == q.size(0):
            # Gather inside the recomputed region, so that only this rank's keys and values are saved.
            k, v = gather_sequence(torch.cat((k, v), dim=-1)).split((k.size(-1), v.size(-1)), dim=-1)
        kwargs: dict[str, Any] = {"scale": self.scale, "spans": batch.spans}
        if self.dropout_rate and self.training:
            heads = q.size(1) * q.size(2)
            first_head = parallel_state.get_tensor_model_parallel_rank() * heads
            kwargs["dropout"] = AttentionDropout(self.dropout_rate, self.layer_number, first_head, batch)
        if q.device.type != "cpu" and self.softcap is None and self.softmax_offset is None:
            return sdpa_attention(q, k, v, batch.lengths, self.window, **kwargs).flatten(1)
        kwargs |= {"softcap": self.softcap, "sinks": self.softmax_offset}
        return packed_attention(q, k, v, batch.lengths, self.window, **kwargs).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The attention sinks, sharded by heads."""
        own = self.state_dict(prefix="", keep_vars=True)
        axes = {"softmax_offset": 0}
        return make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets)


class PackedSelfAttention(SelfAttention):
    """Megatron-Core's self-attention with a forward pass for packed samples."""

    def __init__(self, config: Any, *args: Any, architecture: Architecture, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        layer = self.layer_number - 1
        self.rotated = architecture.position == "rope" and layer not in architecture.unrotated_layers
        # A separate rotary table for layers with a window comes last.
        self.num_tables = 1 if architecture.window_rotary_base is None else 2
        self.table = 0 if architecture.window(layer) is None else self.num_tables - 1
        if architecture.qk_norm and architecture.qk_norm_over == "projection":
            ranks = {"rank": self.tp_group.rank(), "ranks": self.tp_group.size()}
            shape = (architecture.kv_channels, architecture.norm_epsilon)
            self.q_layernorm = ProjectionNorm(config, architecture.num_attention_heads, *shape, **ranks)
            self.k_layernorm = ProjectionNorm(config, architecture.num_query_groups, *shape, **ranks)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor | None, packed_seq_params: PackedBatch, **_unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend and project; returns the output and the bias that the caller adds, or None.

        ``hidden_states`` is [T, 1, H] of this rank's tokens, or [T / tp, 1, H] under sequence parallelism.
        ``rotary_pos_emb`` is that of :func:`~isthmus.engine.layers.rope.rotary_tables`; None for learned positions.
        """
        q, k, v = self._project(hidden_states)
        if self.rotated and rotary_pos_emb is not None:
            table = rotary_pos_emb.chunk(self.num_tables, dim=-1)[self.table]
            interleaved = self.config.rotary_interleaved
            q, k = (rotate(heads, table, interleaved=interleaved) for heads in (q, k))
        return self.linear_proj(self.core_attention(q, k, v, packed_seq_params)[:, None])

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, G, R, D], keys and values [T, G, D]."""
        if self.config.num_query_groups < self.world_size:
            q, k, v = self.get_query_key_value_tensors(hidden_states, None)  # of one group, [T, 1, heads, D]
            return q, k[:, 0], v[:, 0]
        mixed, _ = self.linear_qkv(hidden_states)
        groups = self.num_query_groups_per_partition
        heads_per_group = self.num_attention_heads_per_partition // groups
        mixed = mixed.view(mixed.size(0), groups, heads_per_group + 2, self.hidden_size_per_attention_head)
        q, k, v = mixed.split((heads_per_group, 1, 1), dim=2)
        if self.q_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        return q, k[:, :, 0], v[:, :, 0]
