"""Matmuls on a GPU whose result for a row does not depend on the other rows, for ``train.batch_invariant``.

BLAS libraries choose the order of a sum by the shape. The same token then has other bits in a step of generation than
in a packed sequence of training, and a router may choose other experts. Triton kernels of Megatron-Core add in one
order for all shapes. Its own switch for them imports TransformerEngine.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from isthmus.errors import UsageError

_SETTING = "train.batch_invariant=true"
_DISPATCH_KEY = "CUDA"
"""ROCm has it too."""
_DTYPES = (torch.bfloat16, torch.float16)
"""Dtypes that the kernels do not round. They multiply float32 in TF32, which would disturb the logits of routers."""
_library: torch.library.Library | None = None


def uses_batch_invariant_matmuls() -> bool:
    return _library is not None


def use_batch_invariant_matmuls(device: torch.device) -> str:
    """Replace the matmuls of this process on ``device``, a GPU; returns a line for the log.

    Raises:
        UsageError: there are no such kernels here, or a trial finds that other rows matter.
    """
    replace_matmuls(_kernel(), _DISPATCH_KEY)
    if (reason := _trial(device)) is not None:
        restore_matmuls()
        raise UsageError(f"{_SETTING}: {reason}. Leave it out.")
    return "matmuls: batch-invariant kernels of Megatron-Core, which are slower than those of a BLAS library"


def replace_matmuls(kernel: Callable[[Tensor, Tensor], Tensor], dispatch_key: str) -> None:
    """Compute ``aten::mm`` by ``kernel`` for the devices of a dispatch key, until :func:`restore_matmuls`."""
    global _library
    restore_matmuls()

    def mm(a: Tensor, b: Tensor) -> Tensor:
        # Other dtypes, such as float32, keep their kernels, which only bmm still reaches.
        return kernel(a, b) if a.dtype in _DTYPES else torch.bmm(a[None], b[None])[0]

    def mm_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
        return out.resize_(a.size(0), b.size(1)).copy_(mm(a, b))

    _library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that kernels are replaced
        _library.impl("mm", mm, dispatch_key)
        _library.impl("mm.out", mm_out, dispatch_key)


def restore_matmuls() -> None:
    """Undo :func:`replace_matmuls`."""
    global _library
    if _library is not None:
        _library._destroy()
        _library = None


def _kernel() -> Callable[[Tensor, Tensor], Tensor]:
    try:
        from megatron.core.transformer.custom_layers.batch_invariant_kernels import mm_batch_invariant
    except ImportError as error:
        raise UsageError(
            f"{_SETTING} needs the Triton kernels of Megatron-Core, which cannot be imported here ({error}). Install "
            "Triton for this torch, or leave it out."
        ) from error
    kernel: Callable[[Tensor, Tensor], Tensor] = mm_batch_invariant
    return kernel


def _trial(device: torch.device) -> str | None:
    """Why the matmuls are not batch-invariant on ``device``; None if they are."""
    x = torch.randn(200, 1024, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    try:
        batch = x @ x.t()
        alone = torch.cat([x[:1] @ x.t(), x[1:34] @ x.t(), x[34:] @ x.t()])
    except RuntimeError as error:
        return f"the kernels fail on this GPU ({str(error).partition(chr(10))[0]})"
    return None if torch.equal(batch, alone) else "rows have other results alone than in a batch on this GPU"
