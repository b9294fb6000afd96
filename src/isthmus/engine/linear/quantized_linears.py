"""Models whose frozen linear layers are quantized while their weights are read, one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from isthmus.engine.linear.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from isthmus.engine.linear.quantized_weight import BLOCK, Kind, QuantizedWeight

_LINEAR = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)
"""The linear layers of attention, feed-forward blocks and experts; not the output layer."""


@contextmanager
def unallocated_linears() -> Iterator[None]:
    """Linear layers that are built in the block have weights without memory, until :func:`quantize_frozen`."""

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        return nn.Parameter(parameter.to("meta")) if parameter is not None and _is_linear_weight(module, name) else None

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def quantize_frozen(stages: Sequence[nn.Module], kind: Kind, device: torch.device) -> tuple[str, ...]:
    """Make the frozen weights of linear layers quantized, and allocate the others; returns messages for the user.

    The stages were built with :func:`unallocated_linears`. Weights are set later.
    """
    changed, experts = 0, False
    unequal: dict[str, str] = {}
    for path, module in (named for stage in stages for named in stage.named_modules()):
        if not _is_linear_weight(module, "weight"):
            continue
        weight: nn.Parameter = module.weight
        if weight.requires_grad:
            module.weight = nn.Parameter(torch.empty_like(weight, device=device))
            vars(module.weight).update(vars(weight))
            continue
        module.weight = QuantizedWeight(weight, kind, device)
        changed += 1
        experts |= getattr(module, "is_expert", False)
        if why := _unlike_bitsandbytes(module, kind):
            unequal.setdefault(path.rpartition(".")[2], why)
    messages = [f"{kind}: {changed} linear layers of this rank"]
    messages += [f"{kind}: {name} is quantized, but unlike bitsandbytes: {why}" for name, why in unequal.items()]
    if experts:
        messages.append(f"{kind}: routed experts are quantized, which transformers' BitsAndBytesConfig does not do")
    return tuple(messages)


def _is_linear_weight(module: nn.Module, name: str) -> bool:
    return name == "weight" and isinstance(module, _LINEAR)


def _unlike_bitsandbytes(module: nn.Module, kind: Kind) -> str | None:
    """Why the elements are not those of the same rows and columns of bitsandbytes' linear layer, if they are not."""
    columns = module.weight.size(1)  # type: ignore[operator, union-attr]
    if kind == "nf4" and columns % BLOCK:
        return f"{columns} columns of a rank are no multiple of {BLOCK}, and its blocks cross rows"
    if kind == "int8" and isinstance(module, RowParallelLinear) and module.tp_group.size() > 1:
        return "each rank has the scale of its own columns"
    return None
