"""Matmuls: with the faster of MKL and oneDNN on a CPU (docs/decisions/0023), into float32 sums on a GPU (0034).

:func:`use_table` replaces the choice of the library by that of ``isthmus tune`` (0051). :func:`use_packed` multiplies
by packed weights (0082).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from isthmus.engine.linear.matmul_table import Library, MatmulTable, Operation
from isthmus.platforms.cpu import onednn_is_faster
from isthmus.platforms.torch_features import ADDMM_INTO_FLOAT32, ONEDNN_MATMUL, PACKED_LINEAR

ONEDNN_MIN_FLOP = 1 << 28
"""From this size float32 matmuls on a CPU use oneDNN, which compiles a kernel per shape in 0.3 ms."""
BLOCK_ELEMENTS = 1 << 20
"""Results of a bfloat16 matmul on a CPU at a time: 2 MiB stay in the cache until they are added to float32."""
MatrixKey = tuple[int, torch.Size]
"""Address and shape of a matrix."""
_table: MatmulTable | None = None
_tunable_op = False
_packed: Mapping[MatrixKey, Tensor] = {}


def use_table(table: MatmulTable | None, *, tunable_op: bool = False) -> None:
    """Choose libraries by ``table``; by default for weights that it does not have.

    ``tunable_op`` is whether torch's TunableOp selects GEMM kernels on an AMD GPU. It has none that add to float32, so
    it is off during these.
    """
    global _table, _tunable_op
    if _tunable_op and not tunable_op:  # of another run in this process
        torch.cuda.tunable.enable(False)
    _table, _tunable_op = table, tunable_op


def matrix_key(matrix: Tensor) -> MatrixKey:
    return matrix.data_ptr(), matrix.shape


@contextlib.contextmanager
def use_packed(packed: Mapping[MatrixKey, Tensor]) -> Iterator[None]:
    """Multiply by copies of weights, see :mod:`isthmus.engine.linear.packed_weights`, where ``a`` has several rows."""
    global _packed
    _packed = packed
    try:
        yield
    finally:
        _packed = {}


def matmul(a: Tensor, b: Tensor, *, out: Tensor | None = None, scratch: Tensor | None = None) -> Tensor:
    """``a @ b`` of [..., K] and [K, N] of one dtype; not differentiable.

    The result is written to ``out``. With ``scratch`` it may be written there.
    """
    if _packed and a.numel() > a.size(-1) and (packed := _packed.get(matrix_key(b))) is not None:
        product: Tensor = PACKED_LINEAR(a, packed, None, "none", [], "")
        return product if out is None else out.copy_(product)
    with _library(a, b):
        return torch.matmul(a, b, out=scratch if out is None else out)


def add_matmul(main_grad: Tensor, a: Tensor, b: Tensor, *, shape_repeats: bool = True) -> None:
    """``main_grad += a @ b`` for ``a`` [M, K] and ``b`` [K, N].

    A GPU adds 16-bit matmuls to a float32 ``main_grad`` without rounding them, if :func:`no_float32_sums` has no reason
    against it. A CPU cannot; it rounds and adds blocks of rows that stay in the cache. ``shape_repeats`` False avoids
    compiling a kernel for a shape that is unlikely to repeat.
    """
    if a.dtype == main_grad.dtype:
        with _library(a, b, "add_matmul") if shape_repeats else contextlib.nullcontext():
            main_grad.addmm_(a, b)
        return
    if main_grad.dtype == torch.float32 and a.is_cuda and no_float32_sums(a.device, a.dtype) is None:
        with without_tunable_op() if _tunable_op else _library(a, b, "add_matmul"):
            ADDMM_INTO_FLOAT32(main_grad, a, b, torch.float32, out=main_grad)
        return
    rows = max(1, BLOCK_ELEMENTS // b.size(1)) if a.device.type == "cpu" else a.size(0)
    for target, part in zip(main_grad.split(rows), a.split(rows), strict=True):
        target.add_(part @ b)


def matmul_into_float32(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of 16-bit matrices in float32, where :func:`no_float32_sums` has no reason against it."""
    out = torch.empty(a.size(0), b.size(1), device=a.device)
    with without_tunable_op() if _tunable_op else contextlib.nullcontext():
        ADDMM_INTO_FLOAT32(out, a, b, torch.float32, beta=0, out=out)
    return out


@functools.cache
def no_float32_sums(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why matmuls of ``dtype`` cannot be added to float32 on this device without rounding, or None; a trial decides."""
    if ADDMM_INTO_FLOAT32 is None:
        return f"torch {torch.__version__} has no such matmul"
    # The sum of 15 + 2^-9 products has more digits than the 16-bit types.
    a, b = torch.ones(2, 16, 16, dtype=dtype, device=device)
    a[:, 0] = 2.0**-9
    total = torch.ones(16, 16, device=device)
    try:
        with without_tunable_op() if _tunable_op else contextlib.nullcontext():
            ADDMM_INTO_FLOAT32(total, a.t().contiguous().t(), b, torch.float32, out=total)
        rounded = bool((total != 16 + 2.0**-9).any())
    except RuntimeError as error:
        return f"torch {torch.__version__}: {str(error).partition(chr(10))[0]}"
    return f"torch {torch.__version__} rounds them on this GPU" if rounded else None


def rounded_gradients(device_type: str, dtype: torch.dtype) -> str | None:
    """A line for the log if a GPU rounds the weight gradients of each micro batch to ``dtype``."""
    if device_type != "cuda" or dtype == torch.float32:
        return None
    reason = no_float32_sums(torch.device("cuda", torch.cuda.current_device()), dtype)
    return (
        reason
        and f"weight gradients: each is rounded to {dtype} before float32 sums add it, which is slower ({reason})"
    )


def _library(a: Tensor, b: Tensor, operation: Operation = "matmul") -> AbstractContextManager[None]:
    name = None if _table is None else _table.library(operation, a, b)
    return LIBRARIES[name or default_library(a, b)]()


def default_library(a: Tensor, b: Tensor) -> Library:
    large = a.dtype == torch.float32 and a.device.type == "cpu" and 2 * a.numel() * b.size(-1) >= ONEDNN_MIN_FLOP
    return "onednn" if large and _onednn_is_exact() else "default"


@contextlib.contextmanager
def _onednn() -> Iterator[None]:
    """Make float32 matmuls use oneDNN.

    torch does so if the internal precision is bfloat16; oneDNN uses bfloat16 only on processors with AMX.
    """
    before = ONEDNN_MATMUL.fp32_precision
    ONEDNN_MATMUL.fp32_precision = "bf16"
    try:
        yield
    finally:
        ONEDNN_MATMUL.fp32_precision = before


@contextlib.contextmanager
def _prefer(library: str) -> Iterator[None]:
    """cuBLAS or cuBLASLt, where it has the operation."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library(library)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)


@contextlib.contextmanager
def without_tunable_op() -> Iterator[None]:
    """Without effect if the variable PYTORCH_TUNABLEOP_ENABLED is 1, which wins over the function."""
    torch.cuda.tunable.enable(False)
    try:
        yield
    finally:
        torch.cuda.tunable.enable(True)


LIBRARIES: Mapping[Library, Callable[[], AbstractContextManager[None]]] = {
    "default": contextlib.nullcontext,
    "onednn": _onednn,
    "cublas": functools.partial(_prefer, "cublas"),
    "cublaslt": functools.partial(_prefer, "cublaslt"),
}
"""Contexts in which a matmul is computed by a library."""


@functools.cache
def onednn_keeps_float32() -> bool:
    """Whether float32 matmuls can use oneDNN here, with all bits; a trial decides."""
    if ONEDNN_MATMUL is None or not torch.backends.mkldnn.is_available():
        return False
    values = torch.arange(1.0, 256 * 256 + 1).view(256, 256) / 3
    with _onednn():
        return torch.equal(values @ torch.eye(256), values)


@functools.cache
def _onednn_is_exact() -> bool:
    """Whether oneDNN is faster on this CPU and computes in full float32."""
    return onednn_is_faster() and onednn_keeps_float32()
