"""Communication of a column-parallel linear layer, started so that matmuls overlap it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from isthmus.engine.linear.matmul import matmul

Wait = Callable[[], object]


@dataclass(frozen=True)
class InputExchange:
    """How the ranks of ``group`` share the input of a linear layer; by default each rank has its own."""

    group: dist.ProcessGroup | None = None
    allreduce_dgrad: bool = False
    """The input is equal on all ranks, and its gradient is a sum over them."""
    sequence_parallel: bool = False
    """Each rank has its part of the input on dim 0."""

    def start_gather(self, x: Tensor) -> tuple[Tensor, Wait]:
        """The whole input, valid after the returned function was called."""
        if not self.sequence_parallel:
            return x, lambda: None
        gathered = x.new_empty(x.size(0) * self.group.size(), *x.shape[1:])  # type: ignore[union-attr]
        return gathered, _wait(dist.all_gather_into_tensor(gathered, x.contiguous(), group=self.group, async_op=True))

    def gather(self, x: Tensor) -> Tensor:
        gathered, wait = self.start_gather(x)
        wait()
        return gathered

    def matmul(self, x: Tensor, b: Tensor) -> Tensor:
        """The whole input times ``b``."""
        return matmul(self.gather(x) if self.sequence_parallel else x, b)

    def start_input_grad(self, grad: Tensor, weight: Tensor) -> tuple[Tensor, Wait]:
        """The gradient of ``x`` from that of ``x @ weight.T``, valid after the returned function was called."""
        return self.start_sum(matmul(grad, weight))

    def start_sum(self, grad: Tensor) -> tuple[Tensor, Wait]:
        """The gradient of ``x`` from that of the whole input, valid after the returned function was called."""
        if self.sequence_parallel:
            part = grad.new_empty(grad.size(0) // self.group.size(), *grad.shape[1:])  # type: ignore[union-attr]
            return part, _wait(dist.reduce_scatter_tensor(part, grad, group=self.group, async_op=True))
        if self.allreduce_dgrad:
            return grad, _wait(dist.all_reduce(grad, group=self.group, async_op=True))
        return grad, lambda: None


NO_EXCHANGE = InputExchange()


def _wait(work: dist.Work | None) -> Wait:
    assert work is not None  # None only on ranks outside the group
    return work.wait
