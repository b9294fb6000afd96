"""Finds the Hugging Face tensors that differ, chunk by chunk."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from isthmus.families.architecture import Architecture
from isthmus.families.family import Placement
from isthmus.families.rules.rule import Shape
from isthmus.families.rules.shard import hf_slices
from isthmus.hf.tensors.safetensors_format import byte_view

_INT_BY_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class TensorDifferences:
    """Hugging Face tensors that differ in dtype, or in how many elements and by how much at most."""

    def __init__(self, arch: Architecture) -> None:
        self._arch = arch
        self._dtypes: dict[str, str] = {}
        self._elements: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()

    def compare(self, placed: Placement, rows: slice, a: Tensor, b: Tensor) -> None:
        """Compare rows of a canonical tensor bit by bit. Thread-safe."""
        if a.dtype != b.dtype:
            dtypes = " and ".join(str(side.dtype).removeprefix("torch.") for side in (a, b))
            self._dtypes |= dict.fromkeys(placed.hf, f"is {dtypes}")
            return
        if np.array_equal(byte_view(a), byte_view(b)):  # 8x faster than torch.equal
            return
        local = (slice(0, rows.stop - rows.start),)
        as_int = _INT_BY_ITEMSIZE[a.itemsize]
        with self._lock:  # several experts may be parts of one tensor
            for piece in hf_slices(placed.rule, self._arch, (rows,), local, placed.expert):
                ours, theirs = (piece.view(chunk).contiguous() for chunk in (a, b))
                if unequal := int((ours.view(as_int) != theirs.view(as_int)).sum()):
                    count, largest = self._elements.get(placed.hf[piece.part], (0, 0.0))
                    difference = (ours.double() - theirs.double()).abs().max().item()
                    self._elements[placed.hf[piece.part]] = (count + unequal, max(largest, difference))

    def describe(self, shapes: Mapping[str, Shape]) -> list[str]:
        """One entry per tensor that differs."""
        return [f"{name} {dtypes}" for name, dtypes in self._dtypes.items()] + [
            f"{name} in {count} of {math.prod(shapes[name])} elements, by {largest:.3g} at most"
            for name, (count, largest) in self._elements.items()
        ]
