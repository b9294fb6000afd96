"""Matrix products, on a CPU by the faster of the two libraries that torch brings for them (docs/decisions/0023)."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from isthmus.platforms.cpu import onednn_is_faster

WORTH = 1 << 28
"""Floating-point operations from which on a float32 product on a CPU is oneDNN's, which compiles a kernel for each
shape, in 0.3 ms."""
BLOCK_ELEMENTS = 1 << 20
"""What a bfloat16 product yields at a time on a CPU: 2 MiB, still in the cache when it is added to float32."""


def product(a: Tensor, b: Tensor, *, out: Tensor | None = None) -> Tensor:
    """``a @ b`` of [..., K] and [K, N] of one dtype, as [..., N], in ``out`` if given; not to be differentiated."""
    with _library(a, b):
        return torch.matmul(a, b, out=out)


def add_product(main_grad: Tensor, a: Tensor, b: Tensor, *, recurs: bool = True) -> None:
    """``main_grad += a @ b`` for ``a`` [M, K] and ``b`` [K, N]; in one operation where their dtypes allow it.

    PyTorch has no product of bfloat16 added into float32. On a CPU the product is taken in blocks of rows, so that no
    tensor of the weight's size is written and read again. ``recurs`` says whether products of these shapes come again
    soon, as in the layers of a decoder; else no kernel is compiled for them.
    """
    if a.dtype == main_grad.dtype:
        with _library(a, b) if recurs else contextlib.nullcontext():
            main_grad.addmm_(a, b)
        return
    rows = max(1, BLOCK_ELEMENTS // b.size(1)) if a.device.type == "cpu" else a.size(0)
    for into, part in zip(main_grad.split(rows), a.split(rows), strict=True):
        into.add_(part @ b)


def _library(a: Tensor, b: Tensor) -> AbstractContextManager[None]:
    """In it, ``a @ b`` comes from the library that is faster for it."""
    large = a.dtype == torch.float32 and a.device.type == "cpu" and 2 * a.numel() * b.size(-1) >= WORTH
    return _onednn() if large and _onednn_keeps_float32() else contextlib.nullcontext()


@contextlib.contextmanager
def _onednn() -> Iterator[None]:
    """Float32 products are oneDNN's.

    torch asks it for them once it is told that bfloat16 would do inside; which oneDNN makes use of where a processor
    has AMX, and nowhere else.
    """
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = matmul.fp32_precision
    matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        matmul.fp32_precision = before


@functools.cache
def _onednn_keeps_float32() -> bool:
    """Whether oneDNN is faster here, and multiplies in full float32: seen, and not only believed."""
    if not onednn_is_faster() or not hasattr(torch.backends.mkldnn, "matmul"):
        return False
    fine = torch.arange(1.0, 256 * 256 + 1).view(256, 256) / 3
    with _onednn():
        return torch.equal(fine @ torch.eye(256), fine)
