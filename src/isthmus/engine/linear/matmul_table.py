"""Which library computes which matmul: the choices of ``isthmus tune`` on a CPU or an NVIDIA GPU."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Operation = Literal["matmul", "add_matmul"]
Library = Literal["default", "onednn", "cublas", "cublaslt"]
"""``default``: MKL for float32 on a CPU, the choice of torch elsewhere."""
_Key = tuple[Operation, torch.dtype, int, int, bool]


@dataclass(frozen=True, slots=True)
class MatmulShape:
    """``a`` [m, k] times ``b`` [k, n], as a function of :mod:`isthmus.engine.linear.matmul` gets them."""

    operation: Operation
    """``add_matmul``, for weight gradients, has ``a`` transposed in memory, and a sum over tokens."""
    m: int
    k: int
    n: int
    transposed: bool
    """Whether ``b`` is a transposed view, as a weight in a forward pass."""
    dtype: torch.dtype

    @property
    def flops(self) -> int:
        return 2 * self.m * self.k * self.n

    @property
    def tokens(self) -> int:
        """The dimension that differs from micro batch to micro batch."""
        return self.k if self.operation == "add_matmul" else self.m

    @property
    def key(self) -> _Key:
        """All but the number of tokens."""
        first = self.m if self.operation == "add_matmul" else self.k
        return self.operation, self.dtype, first, self.n, self.transposed


class MatmulTable:
    """The library for a matmul: that of the tuned shape with the same weight and at least as many tokens, if any."""

    def __init__(self, choices: Iterable[tuple[MatmulShape, Library]]) -> None:
        entries: dict[_Key, dict[int, Library]] = {}
        for shape, library in choices:
            entries.setdefault(shape.key, {})[shape.tokens] = library
        self._by_key = {key: (sorted(of), [of[tokens] for tokens in sorted(of)]) for key, of in entries.items()}

    def __contains__(self, shape: MatmulShape) -> bool:
        """Whether a shape with this weight was tuned, for any number of tokens."""
        return shape.key in self._by_key

    def library(self, operation: Operation, a: Tensor, b: Tensor) -> Library | None:
        """For ``a`` [..., K] and ``b`` [K, N]; None if no shape with this weight was tuned."""
        adds = operation == "add_matmul"
        k, n = b.shape
        transposed = b.stride(0) == 1 and n > 1 and k > 1
        entries = self._by_key.get((operation, a.dtype, a.size(0) if adds else k, n, transposed))
        if entries is None:
            return None
        tokens, libraries = entries
        return libraries[min(bisect_left(tokens, k if adds else a.numel() // max(1, k)), len(tokens) - 1)]
