"""What the installed megatron-core has: the differences between 0.16 and 0.19, found by looking, not by its version."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@functools.cache
def saves_common_state_object() -> bool:
    """Whether it saves what is not a tensor as an object in the index (0.19), not in ``common.pt``.

    It reads ``common.pt`` as well, older versions only that. Does not import megatron.core.
    """
    return '"common_state"' in _source("dist_checkpointing/serialization.py")


def grads_for_norm(optimizer: Any) -> list[Tensor]:
    """The gradients of this rank that count in the gradient norm; 0.19 renamed the method."""
    gradients_of = getattr(optimizer, "get_grads_for_grad_norm", None) or optimizer.get_main_grads_for_grad_norm
    grads: list[Tensor] = gradients_of()
    return grads


def _source(name: str) -> str:
    """A file of megatron.core; empty if there is none."""
    package = find_spec("megatron")
    folders = [] if package is None else package.submodule_search_locations or []
    file = next((path for folder in folders if (path := Path(folder, "core", name)).is_file()), None)
    return "" if file is None else file.read_text(encoding="utf-8")
