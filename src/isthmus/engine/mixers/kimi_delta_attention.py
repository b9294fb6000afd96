"""Kimi delta attention (arXiv 2510.26692): a gated delta net with a decay for each channel.

Decays and output gates come from low-rank projections, or are parts of the input projection as in a gated delta net.
Megatron-Core has none; parameters are named like those of its gated delta net.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from isthmus.engine.decoder_config import DecoderConfig
from isthmus.engine.linear.linear import ReplicatedLinear
from isthmus.engine.mixers.gated_delta_net import GatedDeltaNet, wide
from isthmus.engine.mixers.sharded_mixer import recurrence_parameter
from isthmus.families.blocks.delta_net import DeltaNet


class KimiDeltaAttention(GatedDeltaNet):
    """The output is multiplied by the sigmoid of a gate."""

    channel_decay = True

    def __init__(self, config: Any, layer_number: int, *, block: DeltaNet, **kwargs: Any) -> None:
        super().__init__(config, layer_number, block=block, **kwargs)
        self.low_rank: bool = self.sizes.low_rank_gates
        if not self.low_rank:
            return
        hidden, rank = block.hidden_size, self.sizes.value_head_dim
        self.linear_decay_down_proj = ReplicatedLinear(config, hidden, rank)
        self.linear_decay_up_proj = self.projection(rank, self.sizes.key_width)
        self.linear_gate_down_proj = ReplicatedLinear(config, hidden, rank)
        self.linear_gate_up_proj = self.projection(rank, self.sizes.value_width)

    def projected_widths(self) -> tuple[int, ...]:
        """Rows of the input projection of all ranks: queries, keys, values and learning rates.

        Gates and decays of full rank are before and after the learning rates.
        """
        sizes = self.sizes
        if not sizes.low_rank_gates:
            return *(sizes.key_width,) * 2, *(sizes.value_width,) * 2, sizes.num_value_heads, sizes.key_width
        return sizes.key_width, sizes.key_width, sizes.value_width, sizes.num_value_heads

    def decay_parameters(self, heads: int, config: DecoderConfig) -> tuple[nn.Parameter, nn.Parameter]:
        low_rank = self.sizes.low_rank_gates
        shape, axis = ((1, 1, heads, 1), 2) if low_rank else ((heads,), 0)
        steps = recurrence_parameter(heads * self.sizes.key_head_dim, config=config)
        return recurrence_parameter(*shape, config=config, dim=axis), steps

    def projections(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        (projected,) = super().projections(hidden_states)
        if not self.low_rank:
            return (projected,)
        decay, _ = self.linear_decay_up_proj(self.linear_decay_down_proj(hidden_states))
        gate, _ = self.linear_gate_up_proj(self.linear_gate_down_proj(hidden_states))
        return projected, gate, decay

    def split(self, *projected: Tensor) -> tuple[Tensor, ...]:
        if not self.low_rank:
            return super().split(*projected)
        joined, gate, decay = projected
        qkv, beta = joined.split((sum(self.qkv_widths), *self.widths[3:]), dim=-1)
        return qkv, gate, beta, decay

    def log_decays(self, decay: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
        """Log decay of each channel of a key, [T, heads, Dk], in float32."""
        steps = (wide(decay) + dt_bias).unflatten(-1, (-1, self.sizes.key_head_dim))
        rates = wide(a_log).view(-1, 1).exp()
        least = self.sizes.least_log_decay
        return -rates * F.softplus(steps) if least is None else least * (rates * steps).sigmoid()

    def gated(self, normed: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
        return (weight * normed * wide(gate).sigmoid()).to(gate.dtype).flatten(1)
