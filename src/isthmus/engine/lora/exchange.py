"""Communication of the adapters of a tensor-parallel linear layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch.distributed as dist
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

Kind = Literal["column", "row", "replicated"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """How the tensor-parallel ranks share the weight W, the input and the output of a layer.

    A rank has rows (kind column) or columns (kind row) of W. With rows it has the same rows of B and all of A, with
    columns the same columns of A and all of B.
    """

    kind: Kind
    group: dist.ProcessGroup
    sequence_parallel: bool = False
    """Outside of the layer, a rank has a part of the tokens."""
    sums_input_grad: bool = True
    """Whether a column-parallel layer sums the gradient of its input over the ranks; else a layer before it does."""

    def low_rank(self, hidden: Tensor) -> Tensor:
        """``A x`` of the tokens of ``W x``, from that of this rank's tokens and columns."""
        if self.kind == "replicated" or self.group.size() == 1:
            return hidden
        if self.kind == "column":
            if self.sequence_parallel and self.sums_input_grad:
                return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=True, group=self.group)
            return copy_to_tensor_model_parallel_region(hidden, group=self.group) if self.sums_input_grad else hidden
        if self.sequence_parallel:
            return reduce_scatter_to_sequence_parallel_region(hidden, group=self.group)
        return reduce_from_tensor_model_parallel_region(hidden, group=self.group)

    def sum_columns(self, rows: Tensor) -> Tensor:
        """Complete sums over the columns of W, in place."""
        if self.kind == "row" and self.group.size() > 1:
            dist.all_reduce(rows, group=self.group)
        return rows

    def sharded_axis(self, role: str) -> int | None:
        """The axis of which a rank has a part; None if all ranks have the whole tensor."""
        is_a = role == "lora_A"
        return {("column", False): 0, ("row", True): 1}.get((self.kind, is_a))

    def sum_grads(self, parameter: nn.Parameter, role: str) -> None:
        """Let the gradients of a parameter be summed over the ranks if each rank has a part of them.

        With sequence parallelism, each has that of its tokens. Without, the inner gradient of a column-parallel layer
        that does not sum it is that of its rows.
        """
        if self.group.size() == 1 or self.sharded_axis(role) is not None:
            return
        if self.sequence_parallel:
            parameter.sequence_parallel = True  # type: ignore[attr-defined]  # finalize_model_grads reads it
        elif self.kind == "column" and not self.sums_input_grad:
            parameter.register_hook(self._summed)

    def _summed(self, grad: Tensor) -> Tensor:
        grad = grad.clone()
        dist.all_reduce(grad, group=self.group)
        return grad
