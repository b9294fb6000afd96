"""A gate for each attention head: the sigmoid of a projection of the layer's input (arXiv 2505.06708, head-wise)."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from isthmus.engine.layers.recompute import recompute
from isthmus.engine.linear.linear import ColumnParallelLinear
from isthmus.families.blocks.attention import Attention


def build_head_gate(config: TransformerConfig, block: Attention, tp: Any) -> ColumnParallelLinear | None:
    """The projection to the gates of this rank's heads, or None if the layer has none."""
    if not block.head_gate:
        return None
    return ColumnParallelLinear(
        config.hidden_size,
        block.num_attention_heads,
        config=config,
        init_method=config.init_method,
        bias=False,
        gather_output=False,
        skip_bias_add=False,
        is_expert=False,
        tp_group=tp,
    )


def gated_by_head(attended: Tensor, projection: ColumnParallelLinear, hidden_states: Tensor) -> Tensor:
    """``attended`` [T, heads * Dv] times the gates of its heads.

    ``hidden_states`` is the input of attention, [T, 1, H], or [T / tp, 1, H] under sequence parallelism.
    """
    gates, _ = projection(hidden_states)
    return recompute(_gated, attended, gates[:, 0])


def _gated(attended: Tensor, gates: Tensor) -> Tensor:
    factors = gates.to(torch.promote_types(gates.dtype, torch.float32)).sigmoid().to(attended.dtype)
    return (attended.unflatten(-1, (gates.size(-1), -1)) * factors[..., None]).flatten(-2)
