"""Mamba-2 (arXiv 2405.21060) over packed samples, sharded over heads and groups as Megatron-Core's MambaMixer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from isthmus.engine.decoder_config import DecoderConfig
from isthmus.engine.layers.sequence_states import LayerStates
from isthmus.engine.mixers.gated_norm import GatedNorm, gate
from isthmus.engine.mixers.mamba2_groups import RankGroups
from isthmus.engine.mixers.sharded_mixer import DepthwiseConvolution, ShardedMixer, recurrence_parameter
from isthmus.engine.mixers.state_space_scan import sample_scan, scan_step, state_space_scan
from isthmus.engine.tensor_names import MAMBA2_SECTIONS
from isthmus.families.blocks.mamba2 import Mamba2


class Mamba2Mixer(ShardedMixer):
    """Parameters have Megatron-Core's names; time steps, decays and the scan are computed in float32."""

    section_names = MAMBA2_SECTIONS
    compute: Callable[..., Tensor] = staticmethod(state_space_scan)
    """Set by :func:`isthmus.engine.mixers.mamba_kernels.choose_mamba_kernels`."""

    def __init__(self, config: DecoderConfig, layer_number: int, *, block: Mamba2, pg_collection: Any) -> None:
        self.layer_number = layer_number
        sizes = block
        inner, groups = sizes.num_heads * sizes.head_dim, sizes.num_groups * sizes.state_size
        rows, biases = 2 * (inner + groups) + sizes.num_heads, (sizes.in_bias, sizes.out_bias)
        super().__init__(config, pg_collection, rows=rows, width=inner, biases=biases)
        ranks, dtype = self.tp_group.size(), config.params_dtype
        self.sizes = sizes
        self.heads: int = sizes.num_heads // ranks
        self.groups = RankGroups(sizes.num_groups, self.tp_group)
        convolved = (inner // ranks, groups // ranks, groups // ranks)  # x, B, C
        self.widths: tuple[int, ...] = (inner // ranks, *convolved, self.heads)  # z, x, B, C, dt
        self.sections = dict.fromkeys(("in_proj.weight", "in_proj.bias"), self.widths)
        self.sections |= dict.fromkeys(("conv1d.weight", "conv1d.bias"), convolved)
        self.conv1d = DepthwiseConvolution(sum(convolved), sizes.kernel, bias=sizes.conv_bias, dtype=dtype)
        self.A_log, self.D, self.dt_bias = (recurrence_parameter(self.heads, config=config) for _ in range(3))
        self.norm: GatedNorm | None = None
        if sizes.norm is not None:
            gate_first = sizes.norm == "after_gate"
            self.norm = GatedNorm(
                inner // ranks, self.groups, config.layernorm_epsilon, gate_first=gate_first, dtype=dtype
            )

    def mix(self, projected: tuple[Tensor, ...], lengths: tuple[int, ...], states: LayerStates | None) -> Tensor:
        (rows,), widths = projected, self.widths
        if self.sizes.section_multipliers is not None:
            multipliers = zip(widths, self.sizes.section_multipliers, strict=True)
            rows = rows * torch.cat([rows.new_full((width,), multiplier) for width, multiplier in multipliers])
        z, mixed, dt = rows.split([widths[0], sum(widths[1:4]), widths[4]], dim=-1)
        x, b, c = self.conv1d(mixed, lengths, activated=True, states=states).split(widths[1:4], dim=-1)
        wide = torch.promote_types(dt.dtype, torch.float32)
        dt = F.softplus(dt.to(wide) + self.dt_bias).clamp(*self.sizes.time_step_limit)
        heads, decay = x.unflatten(-1, (self.heads, -1)), -self.A_log.to(wide).exp()
        b, c = self.groups.keys(b, c)
        skip = self.D.to(wide)
        if states is None:
            out = self.compute(heads, dt, decay, b, c, skip, lengths).flatten(1)
        else:
            inputs = (heads, dt, b, c)
            out = states.scan("state", sample_scan, scan_step, inputs, a=decay, d=skip).flatten(1)
        return gate(out, z) if self.norm is None else self.norm(out, z)
