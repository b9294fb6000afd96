"""Mamba-1 (arXiv 2312.00752) over packed samples, sharded over channels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from torch import Tensor, nn
from torch.nn import functional as F

from isthmus.engine.decoder_config import DecoderConfig
from isthmus.engine.layers.sequence_states import LayerStates
from isthmus.engine.mixers.gated_norm import gate
from isthmus.engine.mixers.selective_scan import sample_scan, scan_step, selective_scan
from isthmus.engine.mixers.sharded_mixer import (
    DepthwiseConvolution,
    ShardedMixer,
    parameter_entries,
    recurrence_parameter,
    sharded_parameter,
)
from isthmus.families.blocks.mamba import Mamba


class _Projection(nn.Module):
    """A linear layer within the mixer, sharded along ``dim``."""

    def __init__(self, rows: int, columns: int, *, dim: int, dtype: torch.dtype, bias: bool = False) -> None:
        super().__init__()
        self.weight = sharded_parameter(rows, columns, dtype=dtype, dim=dim)
        self.bias = sharded_parameter(rows, dtype=dtype) if bias else None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return parameter_entries(self, prefix, sharded_offsets)


class _SmallNorm(nn.Module):
    """RMSNorm of dt, B or C, which all ranks compute for all tokens: its gradient is the same on all of them."""

    def __init__(self, width: int, eps: float, dtype: torch.dtype, *, weight: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width, dtype=dtype)) if weight else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        normed = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        return (normed if self.weight is None else normed * self.weight).to(x.dtype)


class MambaMixer(ShardedMixer):
    """Time steps, decays and the scan are computed in float32."""

    compute: Callable[..., Tensor] = staticmethod(selective_scan)
    """Set by :func:`isthmus.engine.mixers.mamba_kernels.choose_mamba_kernels`."""

    def __init__(self, config: DecoderConfig, layer_number: int, *, block: Mamba, pg_collection: Any) -> None:
        self.layer_number = layer_number
        self.sizes = sizes = block
        rows, biases = 2 * sizes.inner_size, (sizes.proj_bias, sizes.proj_bias)
        super().__init__(config, pg_collection, rows=rows, width=sizes.inner_size, biases=biases)
        channels, dtype = sizes.inner_size // self.tp_group.size(), config.params_dtype
        self.sections = dict.fromkeys(("in_proj.weight", "in_proj.bias"), (channels, channels))
        self.conv1d = DepthwiseConvolution(channels, sizes.kernel, bias=sizes.conv_bias, dtype=dtype)
        self.widths: dict[str, int] = {"dt": sizes.time_step_rank, "b": sizes.state_size, "c": sizes.state_size}
        self.x_proj = _Projection(sum(self.widths.values()), channels, dim=1, dtype=dtype)
        self.dt_proj = _Projection(channels, sizes.time_step_rank, dim=0, dtype=dtype, bias=True)
        self.A_log = recurrence_parameter(channels, sizes.state_size, config=config)
        self.D = recurrence_parameter(channels, config=config)
        self.norms: bool = sizes.norms
        if sizes.norms:
            epsilon = config.layernorm_epsilon if sizes.norm_epsilon is None else sizes.norm_epsilon
            self.dt_layernorm, self.b_layernorm, self.c_layernorm = (
                _SmallNorm(width, epsilon, dtype, weight=sizes.norm_weights) for width in self.widths.values()
            )

    def mix(self, projected: tuple[Tensor, ...], lengths: tuple[int, ...], states: LayerStates | None) -> Tensor:
        x, z = projected[0].chunk(2, dim=-1)
        x = self.conv1d(x, lengths, activated=True, states=states)
        dt, b, c = self._selected(x)
        wide = torch.promote_types(x.dtype, torch.float32)
        assert self.dt_proj.bias is not None
        dt = F.softplus(F.linear(dt, self.dt_proj.weight).to(wide) + self.dt_proj.bias)
        decay, skip = -self.A_log.to(wide).exp(), self.D.to(wide)
        if states is None:
            return gate(self.compute(x, dt, decay, b, c, skip, lengths), z)
        return gate(states.scan("state", sample_scan, scan_step, (x, dt, b, c), a=decay, d=skip), z)

    def _selected(self, x: Tensor) -> tuple[Tensor, ...]:
        """The low-rank time steps [T, R], and B and C [T, N] of all channels."""
        summed = reduce_from_tensor_model_parallel_region(F.linear(x, self.x_proj.weight))
        parts = summed.split(list(self.widths.values()), dim=-1)
        if self.norms:
            norms = (self.dt_layernorm, self.b_layernorm, self.c_layernorm)
            parts = tuple(norm(part) for norm, part in zip(norms, parts, strict=True))
        # The channels of all ranks use them, so their gradient is the sum over the ranks.
        return copy_to_tensor_model_parallel_region(torch.cat(parts, dim=-1)).split(list(self.widths.values()), dim=-1)
