"""Kimi delta attention (arXiv 2510.26692): a gated delta net with a decay for each channel.

Decays and output gates come from low-rank projections, or are parts of the input projection as in a gated delta net.
Megatron-Core has none; parameters are named like those of its gated delta net.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.layers.linear import ColumnParallelLinear, ReplicatedLinear
from isthmus.engine.mixers.gated_delta_net import GatedDeltaNet, wide
from isthmus.families.architecture import Architecture


class KimiDeltaAttention(GatedDeltaNet):
    """The output is multiplied by the sigmoid of a gate."""

    channel_decay = True

    def __init__(self, config: Any, layer_number: int, *, architecture: Architecture, **kwargs: Any) -> None:
        super().__init__(config, layer_number, architecture=architecture, **kwargs)
        self.low_rank = self.sizes.low_rank_gates
        self.decay_axis = 2 if self.low_rank else 0
        if not self.low_rank:
            return
        hidden, rank = architecture.hidden_size, self.sizes.value_head_dim
        self.linear_decay_down_proj = ReplicatedLinear(config, hidden, rank)
        self.linear_decay_up_proj = ColumnParallelLinear(
            rank, self.sizes.key_width, **self.columns, gather_output=False
        )
        self.linear_gate_down_proj = ReplicatedLinear(config, hidden, rank)
        self.linear_gate_up_proj = ColumnParallelLinear(
            rank, self.sizes.value_width, **self.columns, gather_output=False
        )

    def projected_widths(self) -> tuple[int, ...]:
        """Rows of the input projection of all ranks: queries, keys, values and learning rates.

        Gates and decays of full rank are before and after the learning rates.
        """
        sizes = self.sizes
        if not sizes.low_rank_gates:
            return *(sizes.key_width,) * 2, *(sizes.value_width,) * 2, sizes.num_value_heads, sizes.key_width
        return sizes.key_width, sizes.key_width, sizes.value_width, sizes.num_value_heads

    def decay_shapes(self) -> dict[str, tuple[int, ...]]:
        heads = self.sizes.num_value_heads // self.tp
        of_heads = (1, 1, heads, 1) if self.sizes.low_rank_gates else (heads,)
        return {"A_log": of_heads, "dt_bias": (heads * self.sizes.key_head_dim,)}

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: PackedBatch, **_unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        if not self.low_rank:
            return super().forward(hidden_states, packed_seq_params=packed_seq_params)
        projected, _ = self.in_proj(hidden_states)
        decay, _ = self.linear_decay_up_proj(self.linear_decay_down_proj(hidden_states))
        gate, _ = self.linear_gate_up_proj(self.linear_gate_down_proj(hidden_states))
        return self.mix(packed_seq_params.lengths, projected[:, 0], gate[:, 0], decay[:, 0])

    def sections(self, *projections: Tensor) -> tuple[Tensor, ...]:
        if not self.low_rank:
            return super().sections(*projections)
        projected, gate, decay = projections
        qkv, beta = projected.split((sum(self.qkv_widths), *self.widths[3:]), dim=-1)
        return qkv, gate, beta, decay

    def log_decays(self, decay: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
        """Of each channel of a key, [T, heads, Dk], in float32."""
        steps = (wide(decay) + dt_bias).unflatten(-1, (-1, self.sizes.key_head_dim))
        rates = wide(a_log).view(-1, 1).exp()
        least = self.sizes.least_log_decay
        return -rates * F.softplus(steps) if least is None else least * (rates * steps).sigmoid()

    def gated(self, normed: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
        return (weight * normed * wide(gate).sigmoid()).to(gate.dtype).flatten(1)
