"""Gated delta net (arXiv 2412.06464) over packed samples, with tensor parallelism over heads.

Parameters are named and sharded as in Megatron-Core, whose class needs a GPU and has no packed samples; see
``docs/decisions/0060-gated-delta-nets.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region, set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.checkpoint.sharded_sections import by_sections
from isthmus.engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from isthmus.engine.layers.recompute import recompute
from isthmus.engine.mixers.causal_convolution import causal_convolution
from isthmus.engine.mixers.delta_rule import gated_delta_rule
from isthmus.families.architecture import Architecture

Rule = Callable[..., Tensor]
"""With the arguments of :func:`gated_delta_rule`."""


class _Weight(nn.Module):
    """A parameter ``weight`` of its own name."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, dtype=dtype))


class GatedDeltaNet(MegatronModule):
    """Only the projection of the input and the input of the output projection are saved for the backward pass."""

    decay_axis = 0
    """Of ``A_log``, that of its heads."""
    channel_decay = False
    """Channels of a key have decays of their own."""
    rule: Rule = staticmethod(gated_delta_rule)
    """Set by :func:`isthmus.engine.mixers.delta_kernels.choose_delta_kernels`."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        architecture: Architecture,
        pg_collection: Any,
        **_unused: Any,
    ) -> None:
        super().__init__(config)
        assert architecture.delta_net is not None
        self.sizes = sizes = architecture.delta_net
        self.layer_number, self.tp_group = layer_number, pg_collection.tp
        self.tp = pg_collection.tp.size()
        self.columns: dict[str, Any] = {
            "config": config,
            "init_method": config.init_method,
            "bias": False,
            "skip_bias_add": False,
            "is_expert": False,
            "tp_group": pg_collection.tp,
        }
        self.widths = tuple(width // self.tp for width in self.projected_widths())
        """Of the sections of this rank's projection."""
        self.qkv_widths = tuple(width // self.tp for width in (sizes.key_width, sizes.key_width, sizes.value_width))
        hidden, dtype = architecture.hidden_size, config.params_dtype
        self.in_proj = ColumnParallelLinear(hidden, sum(self.projected_widths()), **self.columns, gather_output=False)
        self.conv1d = _Weight(sum(self.qkv_widths), 1, sizes.conv_kernel, dtype=dtype)
        for name, shape in self.decay_shapes().items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype)))
        self.gated_norm = _Weight(sizes.value_head_dim, dtype=dtype)
        # Read by finalize_model_grads: each rank has a part of the sequence.
        self.gated_norm.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        for parameter in (self.conv1d.weight, self.A_log, self.dt_bias):
            set_tensor_model_parallel_attributes(parameter, True, 0, 1)
        self.A_log.without_decay = True  # type: ignore[attr-defined]
        self.out_proj = RowParallelLinear(sizes.value_width, hidden, input_is_parallel=True, **self.columns)

    def projected_widths(self) -> tuple[int, ...]:
        """Rows of the input projection of all ranks: queries, keys, values, gates, learning rates, decays."""
        sizes = self.sizes
        heads = sizes.num_value_heads
        return sizes.key_width, sizes.key_width, sizes.value_width, sizes.value_width, heads, heads

    def decay_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of this rank's parameters of the decays."""
        return dict.fromkeys(("A_log", "dt_bias"), (self.sizes.num_value_heads // self.tp,))

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: PackedBatch, **_unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Mix the tokens of each sample; shapes are those of ``PackedSelfAttention``."""
        projected, _ = self.in_proj(hidden_states)
        return self.mix(packed_seq_params.lengths, projected[:, 0])

    def sections(self, *projections: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values; gates; learning rates; decays: [T, width] each, of this rank."""
        (projected,) = projections
        return projected.split((sum(self.qkv_widths), *self.widths[3:]), dim=-1)

    def mix(self, lengths: tuple[int, ...], *projections: Tensor) -> tuple[Tensor, Tensor | None]:
        """The output from the arguments of :meth:`sections`, which are saved for the backward pass."""
        # Each rank uses the norm for its heads; with sequence parallelism, Megatron-Core sums its gradients.
        norm = self.gated_norm.weight
        if not self.config.sequence_parallel:
            norm = copy_to_tensor_model_parallel_region(norm, group=self.tp_group)

        def mixed(conv: Tensor, a_log: Tensor, dt_bias: Tensor, norm: Tensor, *projections: Tensor) -> Tensor:
            qkv, gate, beta, decay = self.sections(*projections)
            q, k, v = self._heads(causal_convolution(qkv, conv, None, lengths, activated=True))
            rates = wide(beta).sigmoid() * (2 if self.sizes.negative_eigenvalues else 1)
            out = self.rule(q, k, v, self.log_decays(decay, a_log, dt_bias), rates, lengths)
            return self.gated(_normalized(out, self.sizes.norm_epsilon), norm, gate.unflatten(-1, v.shape[1:]))

        parameters = self.conv1d.weight, self.A_log, self.dt_bias, norm
        out: tuple[Tensor, Tensor | None] = self.out_proj(recompute(mixed, *parameters, *projections)[:, None])
        return out

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
        """Of each head, at most 0, [T, heads, 1], in float32."""
        return (-wide(a_log).exp() * F.softplus(wide(decay) + dt_bias)).unsqueeze(-1)

    def gated(self, normed: Tensor, weight: Tensor, gate: Tensor) -> Tensor:
        """The norm's output times its weight and a gate, all heads joined."""
        return (weight * normed * F.silu(wide(gate))).to(gate.dtype).flatten(1)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        found: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        sharded = {"conv1d.weight": 0, "dt_bias": 0, "A_log": self.decay_axis}
        found |= make_sharded_tensors_for_checkpoint(
            {name: parameter for name, parameter in self.named_parameters() if name in sharded},
            prefix,
            sharded,
            sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=metadata["dp_cp_group"],
        )
        for name, rows in {"in_proj.weight": self.widths, "conv1d.weight": self.qkv_widths}.items():
            found[prefix + name] = by_sections(found[prefix + name], rows)
        return found


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
