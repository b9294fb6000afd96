"""Memory that a rank keeps between steps: weights, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor


def memory_stats(stages: Sequence[Any], optimizer: Any) -> dict[str, int]:
    """Bytes by category. Shared memory counts once, in the first category that has it."""
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    inner = [one.optimizer for one in getattr(optimizer, "chained_optimizers", [optimizer])]
    groups = [group["params"] for one in inner if one is not None for group in one.param_groups]
    states = [list(_tensors(one.state)) for one in inner if one is not None]
    seen: set[int] = set()
    gradients = (getattr(parameter, "main_grad", parameter.grad) for parameter in parameters)
    return {
        "weights": _bytes(parameters, seen),
        "gradients": _bytes((gradient for gradient in gradients if gradient is not None), seen),
        "optimizer state": _bytes((tensor for tensors in (*groups, *states) for tensor in tensors), seen),
    }


def _tensors(state: Mapping[Any, Any]) -> Iterable[Tensor]:
    for entry in state.values():
        yield from (value for value in entry.values() if isinstance(value, Tensor))


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
