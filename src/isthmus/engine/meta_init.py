from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextmanager
def init_empty_weights() -> Iterator[None]:
    """Modules built in the block have parameters on the meta device; buffers are created as usual."""
    hook: Any = _to_meta  # torch's type for such hooks has no return value
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


def _to_meta(_module: nn.Module, _name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None:
        return None
    return nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
