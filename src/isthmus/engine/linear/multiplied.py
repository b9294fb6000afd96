"""Multipliers of the input and output of a block."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor


class _Multiplied:
    """Mixin for blocks that return an output and a bias to add, or None."""

    before: float
    after: float

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        scaled = hidden_states if self.before == 1 else hidden_states * self.before
        out, bias = super().forward(scaled, *args, **kwargs)  # type: ignore[misc]
        if self.after == 1:
            return out, bias
        return out * self.after, None if bias is None else bias * self.after


@functools.cache
def multiplied(kind: type, before: float, after: float) -> type:
    """The class of a block with a multiplier of its input and one of its output; ``kind`` itself if both are 1."""
    if before == after == 1:
        return kind
    return type(kind.__name__, (_Multiplied, kind), {"before": before, "after": after, "__doc__": kind.__doc__})
