"""Building modules whose parameters have a shape and no memory yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def without_memory() -> Iterator[None]:
    """Parameters of modules that are built meanwhile have a shape and no memory; buffers are what they always are."""
    replaced: Any = _on_meta  # torch types such hooks as if what they return were not taken
    handle = register_module_parameter_registration_hook(replaced)
    try:
        yield
    finally:
        handle.remove()


def _on_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None:
        return None
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
