"""Async tensor parallelism: matmuls in parts, which overlap copies of activations between the GPUs of a machine.

The operators are torch's, on symmetric memory (``torch.distributed._symmetric_memory``).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.engine.linear.input_exchange import InputExchange, Wait
from isthmus.engine.linear.matmul import add_matmul
from isthmus.engine.linear.quantized_weight import dense
from isthmus.errors import UsageError
from isthmus.platforms.torch_features import symmetric_memory_ops


class AsyncExchange(InputExchange):
    """Sequence parallelism in which the matmuls of a column-parallel layer include the communication."""

    def matmul(self, x: Tensor, b: Tensor) -> Tensor:
        return _gather_matmul(x, b, self.group)[1]

    def start_input_grad(self, grad: Tensor, weight: Tensor) -> tuple[Tensor, Wait]:
        return _matmul_scatter(grad, weight, self.group), lambda: None


class RowIntoMainGrad(torch.autograd.Function):
    """``x @ weight.T`` summed over the ranks: of ``x`` [T, ..., K / tp], this rank's part [T / tp, ..., N]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.weight = weight  # not saved: a hook on saved tensors would return it without its main_grad
        ctx.group = group
        return _matmul_scatter(x, dense(weight).t(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        grad, grad_x = _gather_matmul(grads[0], dense(weight), ctx.group)
        if x is not None:
            add_matmul(weight.main_grad, grad.flatten(0, -2).t(), x.flatten(0, -2))
            weight.grad_added_to_main_grad = True
        return grad_x, None, None


def check_async_tp(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype) -> None:
    """Compute small results with the operators.

    Raises:
        UsageError: torch lacks them, they fail between these GPUs, or results are wrong.
    """
    ranks, rank = group.size(), group.rank()
    reason = "its results are wrong between these GPUs"
    part = torch.full((16, 16), rank + 1.0, device=device, dtype=dtype)
    ones = torch.ones(16, 16, device=device, dtype=dtype)
    try:
        gathered, result = _gather_matmul(part, ones, group)
        total = _matmul_scatter(torch.cat([part] * ranks), ones, group)
        numbers = torch.arange(1, ranks + 1, device=device).repeat_interleave(16, output_size=16 * ranks)[:, None]
        wrong = (gathered != numbers).any() | (result != 16 * numbers).any() | (total != 8 * ranks * (ranks + 1)).any()
        if not bool(wrong):
            return
    except (RuntimeError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
    raise UsageError(
        f"parallel.async_tp=true: torch {torch.__version__} cannot compute with symmetric memory here ({reason}). It "
        "needs GPUs of one machine that are connected by NVLink or Infinity Fabric. Leave parallel.async_tp out."
    )


def _gather_matmul(x: Tensor, b: Tensor, group: dist.ProcessGroup | None) -> tuple[Tensor, Tensor]:
    """All ranks' ``x`` joined on dim 0, and its matmul with ``b``."""
    ops = symmetric_memory_ops()
    gathered, (out,) = ops.fused_all_gather_matmul(x.contiguous(), [b], 0, group.group_name)  # type: ignore[union-attr]
    return gathered, out


def _matmul_scatter(x: Tensor, b: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """This rank's part, on dim 0, of the sum of all ranks' ``x @ b``."""
    return symmetric_memory_ops().fused_matmul_reduce_scatter(x, b, "sum", 0, group.group_name)  # type: ignore[union-attr]
