"""Gated delta net (arXiv 2412.06464) over packed samples, with tensor parallelism over heads.

Parameters are named and sharded as in Megatron-Core, whose class needs a GPU and has no packed samples; see
``docs/decisions/0060-gated-delta-nets.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from torch import Tensor, nn

from isthmus.engine.decoder_config import DecoderConfig
from isthmus.engine.layers.recompute import recompute
from isthmus.engine.layers.sequence_states import LayerStates
from isthmus.engine.mixers.delta_rule import delta_rule_step, gated_delta_rule, sample_delta_rule
from isthmus.engine.mixers.sharded_mixer import DepthwiseConvolution, ShardedMixer, recurrence_parameter
from isthmus.families.blocks.delta_net import DeltaNet

Rule = Callable[..., Tensor]
"""A function with the arguments of :func:`gated_delta_rule`."""


class _Gain(nn.Module):
    """The weight of a norm that all ranks have."""

    def __init__(self, width: int, config: DecoderConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, dtype=config.params_dtype))
        # Read by finalize_model_grads: each rank has a part of the sequence.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class GatedDeltaNet(ShardedMixer):
    """Only the projection of the input and the input of the output projection are saved for the backward pass."""

    channel_decay = False
    """Channels of a key have decays of their own."""
    rule: Rule = staticmethod(gated_delta_rule)
    """Set by :func:`isthmus.engine.mixers.delta_kernels.choose_delta_kernels`."""

    def __init__(
        self,
        config: DecoderConfig,
        layer_number: int,
        *,
        block: DeltaNet,
        pg_collection: Any,
        **_unused: Any,
    ) -> None:
        self.sizes = sizes = block
        self.layer_number = layer_number
        self.tp: int = pg_collection.tp.size()
        rows = self.projected_widths()
        super().__init__(config, pg_collection, rows=sum(rows), width=sizes.value_width, biases=(False, False))
        self.recomputed = False  # mix always is, and saves less
        self.widths: tuple[int, ...] = tuple(width // self.tp for width in rows)
        """Columns of the sections of this rank's projection."""
        self.qkv_widths: tuple[int, ...] = tuple(
            width // self.tp for width in (sizes.key_width, sizes.key_width, sizes.value_width)
        )
        self.sections = {"in_proj.weight": self.widths, "conv1d.weight": self.qkv_widths}
        self.conv1d = DepthwiseConvolution(
            sum(self.qkv_widths), sizes.conv_kernel, bias=False, dtype=config.params_dtype
        )
        self.A_log, self.dt_bias = self.decay_parameters(sizes.num_value_heads // self.tp, config)
        self.gated_norm = _Gain(sizes.value_head_dim, config)

    def projected_widths(self) -> tuple[int, ...]:
        """Rows of the input projection of all ranks: queries, keys, values, gates, learning rates, decays."""
        sizes = self.sizes
        heads = sizes.num_value_heads
        return sizes.key_width, sizes.key_width, sizes.value_width, sizes.value_width, heads, heads

    def decay_parameters(self, heads: int, config: DecoderConfig) -> tuple[nn.Parameter, nn.Parameter]:
        """``A_log`` and ``dt_bias`` of this rank's heads."""
        return recurrence_parameter(heads, config=config), recurrence_parameter(heads, config=config)

    def split(self, *projected: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values; gates; learning rates; decays: [T, width] each, of this rank."""
        (joined,) = projected
        return joined.split((sum(self.qkv_widths), *self.widths[3:]), dim=-1)

    def mix(self, projected: tuple[Tensor, ...], lengths: tuple[int, ...], states: LayerStates | None) -> Tensor:
        # Each rank uses the norm for its heads; with sequence parallelism, Megatron-Core sums its gradients.
        norm = self.gated_norm.weight
        if not self.config.sequence_parallel:
            norm = copy_to_tensor_model_parallel_region(norm, group=self.tp_group)

        def mixed(conv: Tensor, a_log: Tensor, dt_bias: Tensor, norm: Tensor, *projected: Tensor) -> Tensor:
            qkv, gate, beta, decay = self.split(*projected)
            if states is None:
                qkv = self.conv1d.compute(qkv, conv, None, lengths, activated=True)
            else:
                qkv = self.conv1d(qkv, lengths, activated=True, states=states)
            q, k, v = self._heads(qkv)
            rates = wide(beta).sigmoid() * (2 if self.sizes.negative_eigenvalues else 1)
            decays = self.log_decays(decay, a_log, dt_bias)
            if states is None:
                out = self.rule(q, k, v, decays, rates, lengths)
            else:
                out = states.scan("state", sample_delta_rule, delta_rule_step, (q, k, v, decays, rates))
            return self.gated(_normalized(out, self.sizes.norm_epsilon), norm, gate.unflatten(-1, v.shape[1:]))

        return recompute(mixed, self.conv1d.weight, self.A_log, self.dt_bias, norm, *projected)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys of unit length and values, [T, value heads, width]: several of them share a key head."""
        sizes = self.sizes
        q, k, v = qkv.split(self.qkv_widths, dim=-1)
        q, k = (_unit(x.unflatten(-1, (-1, sizes.key_head_dim))) for x in (q, k))
        shared = sizes.num_value_heads // sizes.num_key_heads
        if shared > 1:
            q, k = (x.repeat_interleave(shared, dim=1) for x in (q, k))
        return q, k, v.unflatten(-1, (-1, sizes.value_head_dim))

    def log_decays(self, decay: Tensor, a_log: Tensor, dt_bias: Tensor) -> Tensor:
        """Log decays of each head, at most 0, [T, heads, 1], in float32."""
        return (-wide(a_log).exp() * F.softplus(wide(decay) + dt_bias)).unsqueeze(-1)

    def gated(self, normed: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
        """The norm's output times its weight and a gate, all heads joined."""
        return (weight * normed * F.silu(wide(gate))).to(gate.dtype).flatten(1)


def wide(x: Tensor) -> Tensor:
    """In float32, or float64 if ``x`` is."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1 in float32, with the epsilon of flash-linear-attention and transformers."""
    x = wide(x)
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()


def _normalized(x: Tensor, epsilon: float) -> Tensor:
    x = wide(x)
    return x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt()
