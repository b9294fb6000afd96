"""How far a kernel may be off from the function that it replaces, computed in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest error of an output or gradient, relative to its largest value. A wrong mask gives about 1."""


def relative_errors(results: Iterable[Tensor], references: Iterable[Tensor]) -> Tensor:
    """Largest error of each tensor, relative to the largest value of its reference on the CPU; NaN if not finite."""
    pairs = zip(results, references, strict=True)
    return torch.stack([(a.float().cpu() - b.float()).abs().max() / b.float().abs().max() for a, b in pairs])
