"""What mixers share that are a projection, a function of each rank's channels, and a projection back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor, nn
from torch.nn.functional import silu

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.decoder_config import DecoderConfig
from isthmus.engine.layers.row_ranges import all_tokens, computed_rows
from isthmus.engine.layers.sequence_states import LayerStates
from isthmus.engine.linear.linear import ColumnParallelLinear, RowParallelLinear
from isthmus.engine.lora.input_dropout import with_this_batch
from isthmus.engine.mixers.causal_convolution import causal_convolution
from isthmus.engine.parallel.sharded_sections import by_sections


def sharded_parameter(*shape: int, dtype: torch.dtype, dim: int = 0) -> nn.Parameter:
    """This rank's part of a parameter that is sharded over the tensor-parallel ranks along ``dim``; not initialized."""
    parameter = nn.Parameter(torch.empty(shape, dtype=dtype))
    tensor_parallel.set_tensor_model_parallel_attributes(parameter, True, dim, 1)
    return parameter


def recurrence_parameter(*shape: int, config: DecoderConfig, dim: int = 0) -> nn.Parameter:
    """A sharded parameter of decays or time steps, without weight decay, which is float32 in 16-bit models.

    Decays are exponentials of it, and their products over a sample enlarge its rounding. Published files have it in
    float32.
    """
    parameter = sharded_parameter(*shape, dtype=torch.promote_types(config.params_dtype, torch.float32), dim=dim)
    parameter.without_decay = True  # type: ignore[attr-defined]
    return parameter


def parameter_entries(module: nn.Module, prefix: str, sharded_offsets: tuple[Any, ...]) -> dict[str, Any]:
    """Checkpoint entries of a module's own parameters, sharded as :func:`sharded_parameter` marks them."""
    parameters: dict[str, Any] = dict(module.named_parameters(recurse=False))
    axes = {
        name: parameter.partition_dim
        for name, parameter in parameters.items()
        if getattr(parameter, "tensor_model_parallel", False)
    }
    entries: dict[str, Any] = make_sharded_tensors_for_checkpoint(parameters, prefix, axes, sharded_offsets)
    return entries


_INPUTS = "inputs of the convolution"


class DepthwiseConvolution(nn.Module):
    """A causal convolution of this rank's channels, with the parameters of a torch ``Conv1d``."""

    compute: Callable[..., Tensor] = staticmethod(causal_convolution)
    """Set by :func:`isthmus.engine.mixers.mamba_kernels.choose_mamba_kernels`."""

    def __init__(self, channels: int, kernel: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = sharded_parameter(channels, 1, kernel, dtype=dtype)
        self.bias = sharded_parameter(channels, dtype=dtype) if bias else None

    def forward(
        self, x: Tensor, lengths: tuple[int, ...], *, activated: bool, states: LayerStates | None = None
    ) -> Tensor:
        """See :func:`causal_convolution`; in generation, ``states`` have the inputs before those of this batch."""
        if states is not None:
            if not states.is_prefill:
                return self._next(x, states, activated=activated)
            states.keep_last(_INPUTS, x, self.weight.size(-1) - 1)
        return self.compute(x, self.weight, self.bias, lengths, activated=activated)

    def _next(self, x: Tensor, states: LayerStates, *, activated: bool) -> Tensor:
        """One token of each sequence."""
        wide = torch.promote_types(x.dtype, torch.float32)
        rows = states.shifted(_INPUTS, x, self.weight.size(-1) - 1).to(wide)
        out = (rows * self.weight[:, 0].t().to(wide)).sum(1)
        if self.bias is not None:
            out += self.bias
        return (silu(out) if activated else out).to(x.dtype)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: Any = (), metadata: Any = None) -> dict[str, Any]:
        return parameter_entries(self, prefix, sharded_offsets)


class ShardedMixer(MegatronModule, ABC):
    """``out_proj(mix(projections(x)))``, where ``mix`` has no communication, or its own.

    The rows of some parameters are sections that are sharded each by itself.
    """

    layer_number: int
    sections: Mapping[str, Sequence[int]]
    """Rows of the sections of a parameter on this rank."""
    section_names: Mapping[str, Sequence[str]] = {}
    """Names of sections by module, if they are separate tensors in a checkpoint."""

    def __init__(
        self, config: DecoderConfig, pg_collection: Any, *, rows: int, width: int, biases: tuple[bool, bool]
    ) -> None:
        """``rows`` of ``in_proj`` and ``width`` of ``out_proj`` count all ranks; ``biases`` are those of the two."""
        super().__init__(config)
        self.tp_group: torch.distributed.ProcessGroup = pg_collection.tp
        self._shared = {
            "config": config,
            "init_method": config.init_method,
            "is_expert": False,
            "tp_group": self.tp_group,
        }
        self.in_proj: ColumnParallelLinear = self.projection(config.hidden_size, rows, bias=biases[0])
        self.out_proj = RowParallelLinear(
            width, config.hidden_size, bias=biases[1], input_is_parallel=True, skip_bias_add=True, **self._shared
        )
        self.recomputed: bool = "core_attn" in config.recomputed

    def projection(self, columns: int, rows: int, *, bias: bool = False) -> ColumnParallelLinear:
        """A linear layer whose ``rows``, of all ranks, are sharded."""
        return ColumnParallelLinear(columns, rows, bias=bias, gather_output=False, skip_bias_add=False, **self._shared)

    def forward(
        self, hidden_states: Tensor, *, packed_seq_params: PackedBatch, **_unused: Any
    ) -> tuple[Tensor, Tensor | None]:
        """The output, and the bias that the caller adds, or None.

        ``hidden_states`` and the output are [T, 1, H], or [T / tp, 1, H] under sequence parallelism.
        """

        lengths, shared, states = packed_seq_params.lengths, packed_seq_params.shared, None
        if packed_seq_params.states is not None:
            states = LayerStates(packed_seq_params.states, self.layer_number, lengths)

        def mix(*projected: Tensor) -> Tensor:
            tokens = tuple(all_tokens(tensor[:, 0], shared) for tensor in projected)
            return computed_rows(self.mix(tokens, lengths, states), shared)[:, None]

        projected = self.projections(hidden_states)
        if self.recomputed and self.training:
            mixed = tensor_parallel.checkpoint(with_this_batch(mix), False, *projected)
        else:
            mixed = mix(*projected)
        output: tuple[Tensor, Tensor | None] = self.out_proj(mixed)
        return output

    def projections(self, hidden_states: Tensor) -> tuple[Tensor, ...]:
        """Arguments of :meth:`mix`, [T, 1, rows / tp] each."""
        projected, _ = self.in_proj(hidden_states)
        return (projected,)

    @abstractmethod
    def mix(self, projected: tuple[Tensor, ...], lengths: tuple[int, ...], states: LayerStates | None) -> Tensor:
        """[T, rows / tp] each -> [T, width / tp] for samples of these lengths.

        In generation they continue from ``states``, which are updated.
        """

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        state |= parameter_entries(self, prefix, sharded_offsets)
        for name, rows in self.sections.items():
            if (key := prefix + name) in state:
                state[key] = by_sections(state[key], rows, self.section_names.get(name.partition(".")[0], ()))
        return state
