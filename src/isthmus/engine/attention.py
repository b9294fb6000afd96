"""Causal self-attention over a line of packed samples.

A micro batch is one line of T tokens, samples end to end ("thd"). The projections see the whole line, the scores
only ever one sample: no token is padded, none sees another sample, and no [T, T] mask exists.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from isthmus.engine.line_attention import line_attention
from isthmus.engine.norm import ProjectionNorm
from isthmus.engine.rope import rotate
from isthmus.families.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Segments:
    """Where the samples of a packed line begin and end."""

    lengths: tuple[int, ...]
    """Tokens of each sample, on the host, so that no layer waits for the device to learn them."""
    learned: tuple[int, ...] = ()
    """Labels learned in each sample; () where nothing is learned."""
    padded: bool = False
    """Whether the last sample is padding."""


def sample_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: tuple[int, ...],
    window: int | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """Attend causally within each sample of a line, one after the other, with PyTorch's own kernel.

    Args and returns: those of :func:`isthmus.engine.line_attention.line_attention`, which is the faster one on CPUs
    and has scores that are capped and sinks, which PyTorch's kernel has not.
    """
    outputs = []
    for q_s, k_s, v_s in zip(*(tensor.split(list(lengths)) for tensor in (q.flatten(1, 2), k, v)), strict=True):
        masked = window is not None and q_s.size(0) > window
        out = scaled_dot_product_attention(
            q_s.transpose(0, 1)[None],
            k_s.transpose(0, 1)[None],
            v_s.transpose(0, 1)[None],
            attn_mask=_window_mask(q_s, window) if masked and window is not None else None,
            is_causal=not masked,
            scale=scale,
            enable_gqa=q.size(2) > 1,
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs).unflatten(1, q.shape[1:3])


def _window_mask(q: Tensor, window: int) -> Tensor:
    """True where a query may look: at itself and the ``window - 1`` keys before it."""
    index = torch.arange(q.size(0), device=q.device)
    distance = index[:, None] - index[None, :]
    return (distance >= 0) & (distance < window)


class VarlenAttention(nn.Module):
    """Softmax attention within each sample; key/value heads are shared by a group of query heads, not copied."""

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
        self.recomputed = config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules

    def forward(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        """Attend.

        Args:
            q: [T, G, R, D], R query heads to each of G key/value heads.
            k: [T, G, D].
            v: [T, G, Dv].
            segments: sample lengths that sum to T.

        Returns:
            [T, G * R * Dv]
        """
        if self.recomputed and self.training:
            attended = tensor_parallel.checkpoint(lambda q, k, v: self._attend(q, k, v, segments), False, q, k, v)
            return attended  # type: ignore[no-any-return]
        return self._attend(q, k, v, segments)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments) -> Tensor:
        plain = self.softcap is None and self.softmax_offset is None
        if plain and q.device.type != "cpu":
            return sample_attention(q, k, v, segments.lengths, self.window, scale=self.scale).flatten(1)
        return line_attention(
            q, k, v, segments.lengths, self.window, scale=self.scale, softcap=self.softcap, sinks=self.softmax_offset
        ).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """The sinks, cut by heads."""
        own = self.state_dict(prefix="", keep_vars=True)
        axes = {"softmax_offset": 0}
        found: dict[str, Any] = make_sharded_tensors_for_checkpoint(own, prefix, axes, sharded_offsets)
        return found


class PackedSelfAttention(SelfAttention):
    """Megatron-Core's self-attention parameters with a forward pass for packed lines.

    The parent's forward handles inference, padding and a rotary table per layer; this one does what training
    needs and nothing else. Parameters, sharding and checkpoint names are the parent's.
    """

    def __init__(self, config: Any, *args: Any, architecture: Architecture, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        layer = self.layer_number - 1
        self.rotated = architecture.position == "rope" and layer not in architecture.unrotated_layers
        # Of the tables of angles, that of layers with a window stands last.
        self.tables = 1 if architecture.window_rotary_base is None else 2
        self.table = 0 if architecture.window(layer) is None else self.tables - 1
        if architecture.qk_norm and architecture.qk_norm_over == "projection":
            place = {"rank": self.tp_group.rank(), "ranks": self.tp_group.size()}
            shape = (architecture.kv_channels, architecture.norm_epsilon)
            self.q_layernorm = ProjectionNorm(config, architecture.num_attention_heads, *shape, **place)
            self.k_layernorm = ProjectionNorm(config, architecture.num_query_groups, *shape, **place)

    def forward(  # type: ignore[override]
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor | None, packed_seq_params: Segments, **_unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend and project.

        Args:
            hidden_states: [T, 1, H], or [T / tp, 1, H] under sequence parallelism.
            rotary_pos_emb: from :func:`isthmus.engine.rope.line_tables`; None where positions are learned.
            packed_seq_params: the samples of the line.

        Returns:
            The output [T, 1, H] (or [T / tp, 1, H]) and the bias that the caller still has to add, or None.
        """
        q, k, v = self._project(hidden_states)
        if self.rotated and rotary_pos_emb is not None:
            table = rotary_pos_emb.chunk(self.tables, dim=-1)[self.table]
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
        head_dim = self.hidden_size_per_attention_head
        heads_per_group = self.num_attention_heads_per_partition // groups
        mixed = mixed.view(mixed.size(0), groups, heads_per_group + 2, head_dim)
        q, k, v = mixed.split((heads_per_group, 1, 1), dim=2)
        if self.q_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        return q, k[:, :, 0], v[:, :, 0]
