"""Causal self-attention over packed samples ("thd"), without padding and without a [T, T] mask."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.attention_backends.backends import BACKENDS
from isthmus.engine.layers.dropout import AttentionDropout
from isthmus.engine.layers.norm import ProjectionNorm
from isthmus.engine.layers.recompute import recompute_if
from isthmus.engine.layers.rope import rotate
from isthmus.engine.parallel.context_parallel import gather_sequence
from isthmus.families.architecture import Architecture


class CoreAttention(nn.Module):
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
        self.backend = BACKENDS[config.attention]
        self.dropout_rate = config.attention_dropout
        self.recomputed = "core_attn" in config.recomputed

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
        given = {"scale": self.scale, "softcap": self.softcap, "sinks": self.softmax_offset, "spans": batch.spans}
        kwargs: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if self.dropout_rate and self.training:
            heads = q.size(1) * q.size(2)
            first_head = parallel_state.get_tensor_model_parallel_rank() * heads
            kwargs["dropout"] = AttentionDropout(self.dropout_rate, self.layer_number, first_head, batch)
        return self.backend.attend(q, k, v, batch.lengths, self.window, **kwargs).flatten(1)

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
        table = None
        if self.rotated and rotary_pos_emb is not None:
            table = rotary_pos_emb.chunk(self.num_tables, dim=-1)[self.table]
        heads = self._normed_and_rotated(q, k, table)
        recomputed = "rope" in self.config.recomputed and table is not None
        with recompute_if(recomputed, heads, lambda: self._normed_and_rotated(q, k, table)):
            attended = self.core_attention(*heads, v.squeeze(2), packed_seq_params)
        return self.linear_proj(attended[:, None])

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, G, R, D], keys and values [T, G, 1, D], before their norms."""
        if self._has_part_of_a_group:
            return self.get_query_key_value_tensors(hidden_states, None)  # after their norms
        mixed, _ = self.linear_qkv(hidden_states)
        groups = self.num_query_groups_per_partition
        heads_per_group = self.num_attention_heads_per_partition // groups
        mixed = mixed.view(mixed.size(0), groups, heads_per_group + 2, self.hidden_size_per_attention_head)
        return mixed.split((heads_per_group, 1, 1), dim=2)

    def _normed_and_rotated(self, q: Tensor, k: Tensor, table: Tensor | None) -> list[Tensor]:
        """Queries [T, G, R, D] and keys [T, G, D] of the attention."""
        if self.q_layernorm is not None and not self._has_part_of_a_group:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        heads = [q, k.squeeze(2)]  # an index would have a gradient of zeros to copy into
        if table is None:
            return heads
        return [rotate(each, table, interleaved=self.config.rotary_interleaved) for each in heads]

    @property
    def _has_part_of_a_group(self) -> bool:
        return bool(self.config.num_query_groups < self.world_size)
