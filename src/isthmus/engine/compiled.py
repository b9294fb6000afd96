"""Regions: functions of tensors that ``torch.compile`` fuses into a few kernels on a GPU (docs/decisions/0035).

Regions are the bodies of autograd functions and not whole layers: the backward pass of a linear layer adds its weight
gradient to a buffer, which the compiler cannot trace.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import shutil
import warnings
from collections.abc import Callable
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from isthmus.errors import UsageError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_devices: frozenset[str] = frozenset()
"""Types of the devices whose tensors are computed by compiled regions."""
_VARIANTS = 32
"""Compiled versions of one region: dtypes, widths and memory layouts."""


def set_compile(enabled: bool, *, device: str = "cuda") -> None:
    """Compile regions at their first call with a tensor on ``device``; without this call they run eagerly."""
    global _devices
    _devices = frozenset({device}) if enabled else frozenset()


def compiles(tensor: Tensor) -> bool:
    """Whether regions with this tensor are compiled."""
    return tensor.device.type in _devices


def choose_compile(setting: bool | Literal["auto"], device: str, failure: str = "") -> str | None:
    """Apply ``train.compile`` to this process; returns a line for the log.

    ``failure`` is that of a trial on any rank (:func:`compile_failure`): replicated weights need the same kernels.

    Raises:
        UsageError: ``setting`` is True, and there is no compiler for ``device``, or training is deterministic.
    """
    compiler, missing = find_compiler(device)
    missing = missing or failure
    if setting is True and missing:
        raise UsageError(f"train.compile=true cannot be used here: {missing}. Use train.compile=auto.")
    enabled = setting is True or (setting == "auto" and device != "cpu" and not missing)
    set_compile(enabled, device=device)
    if enabled:
        return f"compile: on ({compiler})"
    if device == "cpu":
        return None
    reason = "train.compile=false" if setting is False else missing
    return f"compile: off, {reason}; norms, activations and rotary embeddings run as separate kernels"


def compile_failure(setting: bool | Literal["auto"], device: str) -> str:
    """Why ``train.compile=auto`` cannot compile or launch a kernel on this rank's GPU; empty if it can."""
    if setting != "auto" or device == "cpu" or find_compiler(device)[1]:
        return ""
    return _trial(device)


def _trial(device: str) -> str:
    """Triton builds a launcher with the headers of Python, and needs its compiler, ptxas or ld.lld, and a cache."""
    x = torch.ones(64, 64, device=device)
    if type(x) is not Tensor:  # a fake tensor has no data
        return ""
    try:
        result = torch.compile(lambda value: value * 2 + 1, fullgraph=True, dynamic=False)(x).cpu()
    except Exception as error:  # of the compiler, Triton or the driver
        return f"a trial failed ({_first_line(error)})"
    return "" if bool((result == 3).all()) else "a trial computed wrong values"


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def find_compiler(device: str) -> tuple[str, str]:
    """The compiler's name, and why there is none to use; one of them is empty."""
    if torch.are_deterministic_algorithms_enabled():
        # The lengths of the first calls decide how a kernel divides its sums, and a resumed run has others.
        return "", "train.deterministic=true excludes compiled kernels, whose sums depend on the first lengths"
    named, usual = ("CXX", ("g++", "clang++")) if device == "cpu" else ("CC", ("gcc", "clang"))
    compiler = next((name for name in (os.environ.get(named), *usual) if name and shutil.which(name)), None)
    if compiler is None:
        return "", f"no C{'++' if device == 'cpu' else ''} compiler was found ({', '.join(usual)} or ${named})"
    if device == "cpu":
        return compiler, ""
    try:
        return f"Triton {importlib.import_module('triton').__version__}", ""
    except ImportError as error:
        return "", f"Triton cannot be imported ({error})"


def compiled_on_gpu(function: _Function) -> _Function:
    """Compile ``function`` for GPU tensors if :func:`set_compile` enabled it; else call it.

    ``function`` takes positional arguments: tensors, the first of them with at least one dimension, and constants
    (numbers, dtypes, None). Lengths may change from call to call: dimension 0 of the first tensor, and of the others
    that have the same length and are not parameters. New constants and other sizes compile it again. Autograd must not
    record its operations: call it in the methods of an autograd function, or under ``no_grad``.

    Raises:
        UsageError: the compiler failed.
        ValueError: an argument needs a gradient.
    """
    return cast(_Function, _Region(function))


class _Region:
    def __init__(self, function: Callable[..., Any]) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.name = f"{function.__module__.removeprefix('isthmus.')}.{function.__qualname__}"
        self.compiled: Callable[..., Any] | None = None
        self.too_many_variants = False

    def __call__(self, *args: Any) -> Any:
        if not compiles(args[0]) or self.too_many_variants:
            return self.function(*args)
        length = args[0].size(0)
        if length < 2 or args[0].numel() == 0:  # 0 and 1 are constants to the compiler
            return self.function(*args)
        # A detached tensor has no marks, and tensors that need gradients have no variants of their own.
        detached = [self._detached(x, length) if isinstance(x, Tensor) else x for x in args]
        return self._run(detached) if type(detached[0]) is Tensor else self.function(*args)  # a fake tensor has no data

    def _detached(self, tensor: Tensor, length: int) -> Tensor:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{self.name} is compiled, and autograd would not record it; call it in an autograd function or under "
                "torch.no_grad()"
            )
        detached = tensor.detach()
        if tensor.dim() and tensor.size(0) == length and not isinstance(tensor, Parameter):
            torch._dynamo.maybe_mark_dynamic(detached, 0)
        return detached

    def _run(self, args: list[Any]) -> Any:
        if self.compiled is None:
            # Only marked dimensions are dynamic. Widths stay constants, which the kernels need for aligned loads.
            self.compiled = torch.compile(self.function, fullgraph=True, dynamic=False, **compile_limit())
        try:
            return self.compiled(*args)
        except _limit_errors():
            self.too_many_variants = True
            warnings.warn(
                f"{self.name} was compiled too often and runs eagerly from here on, which is slower. "
                "TORCH_LOGS=recompiles shows why; train.compile=false avoids the compiler.",
                stacklevel=3,
            )
            return self.function(*args)
        except Exception as error:
            if not isinstance(error, torch._dynamo.exc.TorchDynamoException) and not _is_of_triton(error):
                raise
            reason = _first_line(error)
            raise UsageError(f"torch.compile failed for {self.name} ({reason}). Set train.compile=false.") from error


def _is_of_triton(error: Exception) -> bool:
    """Such as too little shared memory for a kernel, which is noticed when it is launched."""
    return type(error).__module__.partition(".")[0] == "triton"


@functools.cache
def _limit_errors() -> tuple[type[Exception], ...]:
    errors = torch._dynamo.exc
    return (errors.FailOnRecompileLimitHit, *filter(None, [getattr(errors, "RecompileLimitExceeded", None)]))


def compile_limit() -> dict[str, Any]:
    """The argument of ``torch.compile`` that raises the number of versions of a function, if this torch has it."""
    return {"recompile_limit": _VARIANTS} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
