"""Regions: functions of tensors that ``torch.compile`` fuses into a few kernels on a GPU (docs/decisions/0035).

Regions are the bodies of autograd functions and not whole layers: the backward pass of a linear layer adds its weight
gradient to a buffer, which the compiler cannot trace.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import operator
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, cast

import sympy
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from isthmus.errors import UsageError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_devices: frozenset[str] = frozenset()
"""Types of the devices whose tensors are computed by compiled regions."""
_VERSIONS = 32
"""Most compiled versions of one region: dtypes, widths and memory layouts."""
_RECENT = 256
"""Most argument lists of one region whose version is remembered."""
compiled_versions: Counter[str] = Counter()
"""Versions that this process has compiled, by region."""


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


def compiled_on_gpu(function: _Function, *, name: str | None = None) -> _Function:
    """Compile ``function`` for GPU tensors if :func:`set_compile` enabled it; else call it.

    ``function`` takes positional arguments: tensors, the first of them with at least one dimension, and constants
    (numbers, dtypes, None), and returns a tensor or a tuple of tensors and constants. Lengths may change from call to
    call: dimension 0 of the first tensor, and of the others that have the same length and are not parameters. New
    constants and other sizes compile it again. Autograd must not record its operations: call it in the methods of an
    autograd function, or under ``no_grad``. Errors and traces call it ``name``; None: by the name of the function.

    Raises:
        UsageError: the compiler failed.
        ValueError: an argument needs a gradient.
    """
    return cast(_Function, _Region(function, name or region_name(function)))


def region_name(function: Callable[..., Any]) -> str:
    """Module and name of a function, or of that of a partial."""
    named = getattr(function, "func", function)
    return f"{named.__module__.removeprefix('isthmus.')}.{named.__qualname__}"


class _Region:
    def __init__(self, function: Callable[..., Any], name: str) -> None:
        functools.update_wrapper(self, function)
        self.function, self.name = function, name
        self.versions: dict[tuple[Any, ...], list[_Version]] = {}
        """The versions by layouts and constants."""
        self.recent: dict[tuple[Any, ...], _Version] = {}
        """Versions by sizes, strides, dtypes and constants, which the layers of a micro batch share."""
        self.too_many_versions = False

    def __call__(self, *args: Any) -> Any:
        if not compiles(args[0]):
            return self.function(*args)
        if torch.is_grad_enabled():
            self.check_gradients(args)
        exact = tuple([(x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else x for x in args])
        version = self.recent.get(exact) or self._version(args)
        if version is None:
            return self.function(*args)
        if len(self.recent) == _RECENT:
            self.recent.clear()
        self.recent[exact] = version
        try:
            return version.results(version.compiled(*[x for x in args if isinstance(x, Tensor)]))
        except Exception as error:
            # Such as too little shared memory for a kernel, which is noticed when it is launched.
            if type(error).__module__.partition(".")[0] != "triton":
                raise
            raise self._failed(error) from error

    def _version(self, args: tuple[Any, ...]) -> _Version | None:
        """The version for these arguments, compiled if there is none; None: run them eagerly."""
        length = args[0].size(0)
        if self.too_many_versions or length < 2 or args[0].numel() == 0:  # 0 and 1 are constants to the compiler
            return None
        if type(args[0]) not in (Tensor, Parameter):  # a fake tensor has no data
            return None
        key = tuple(_layout(x, length) if isinstance(x, Tensor) else (type(x), x) for x in args)
        for version in self.versions.get(key, ()):
            if version.accepts(length):
                return version
        if sum(map(len, self.versions.values())) == _VERSIONS:
            self.too_many_versions = True
            warnings.warn(
                f"{self.name} was compiled too often and runs eagerly from here on, which is slower. "
                "TORCH_LOGS=dynamic shows why lengths differ; train.compile=false avoids the compiler.",
                stacklevel=3,
            )
            return None
        version = self._compile(args, length)
        self.versions.setdefault(key, []).append(version)
        compiled_versions[self.name] += 1
        return version

    def check_gradients(self, args: Sequence[Any]) -> None:
        """Raises ValueError if autograd would record the region."""
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            raise ValueError(
                f"{self.name} is compiled, and autograd would not record it; call it in an autograd function or under "
                "torch.no_grad()"
            )

    def _compile(self, args: Sequence[Any], length: int) -> _Version:
        try:
            try:
                return _compile(self.function, args, length, dynamic=True)
            except RuntimeError:  # another tensor has as many rows by chance, and must keep them
                return _compile(self.function, args, length, dynamic=False)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise self._failed(error) from error

    def _failed(self, error: Exception) -> UsageError:
        return UsageError(f"torch.compile failed for {self.name} ({_first_line(error)}). Set train.compile=false.")


def _has_length(x: Tensor, length: int) -> bool:
    """Whether dimension 0 is the length of the call; a parameter may have as many rows by chance."""
    return x.dim() > 0 and x.size(0) == length and not isinstance(x, Parameter)


def _layout(x: Tensor, length: int) -> tuple[Any, ...]:
    """What a compiled version depends on: dtype, sizes and strides, those that follow ``length`` as its multiples.

    Multiples are negative numbers: [T, 2, 3] is ``(-1, 2, 3)``, and its strides are ``(3, -3, 1)`` if dimension 1 is
    the outermost.
    """
    if not _has_length(x, length):
        return x.dtype, x.shape, x.stride()
    strides = x.stride()
    outside = strides[0] * length  # strides of the dimensions around dimension 0
    if outside and any(stride >= outside for stride in strides):
        strides = tuple(stride if stride < outside or stride % length else -(stride // length) for stride in strides)
    return x.dtype, (-1, *x.shape[1:]), strides


class _Version(NamedTuple):
    """A function compiled for one layout of its tensors, and one set of constants."""

    compiled: Callable[..., Sequence[Any]]
    """Takes the tensors among the arguments, and returns those of the results."""
    results: Callable[[Sequence[Any]], Any]
    """The result of the function from these."""
    accepts: Callable[[int], bool]
    """Whether it is valid for a length; the compiler assumes, for example, that 32 bits hold all indices."""


def _compile(function: Callable[..., Any], args: Sequence[Any], length: int, *, dynamic: bool) -> _Version:
    """Trace ``function`` and compile it with inductor, without dynamo; for any length if ``dynamic``.

    ``torch.compile`` checks at each call what the function and its tensors may depend on, which takes the host as long
    as ten kernels (docs/decisions/0089). Here the caller compares the layout.
    """
    from torch._dispatch.python import enable_python_dispatcher
    from torch._dynamo.source import ConstantSource
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    shapes = ShapeEnv()
    source = ConstantSource("length")
    symbol = shapes.create_symbol(length, source, DimDynamic.DYNAMIC)
    symbolic_length = shapes.create_symintnode(symbol, hint=length, source=source)
    results: Any = None

    def fake(x: Tensor) -> Tensor:
        dtype, *layout = _layout(x, length if dynamic else -1)
        sizes, strides = ([-n * symbolic_length if n < 0 else n for n in numbers] for numbers in layout)
        return torch.empty_strided(sizes, strides, dtype=dtype, device=x.device)

    def of_tensors(*tensors: Tensor) -> list[Tensor]:
        nonlocal results
        remaining = iter(tensors)
        result = function(*(next(remaining) if isinstance(x, Tensor) else x for x in args))
        outputs, structure = tree_flatten(result)
        places = [number for number, output in enumerate(outputs) if isinstance(output, Tensor)]
        if isinstance(result, Tensor):
            results = operator.itemgetter(0)
        elif type(result) is tuple and len(result) == len(places):
            results = tuple
        else:
            constants = [None if isinstance(output, Tensor) else output for output in outputs]
            results = functools.partial(_nested, structure, constants, places)
        return [outputs[place] for place in places]

    mode = FakeTensorMode(shape_env=shapes)
    with tracing(TracingContext(mode)), torch.no_grad():
        with mode, enable_python_dispatcher():
            fakes = [fake(x) for x in args if isinstance(x, Tensor)]
            graph = make_fx(of_tensors)(*fakes)
        compiled: Any = compile_fx(graph, fakes)
    conditions = [guard.expr for guard in shapes.guards]

    @functools.lru_cache(maxsize=1024)
    def accepts(other: int) -> bool:
        same_sizes = dynamic or other == length
        return same_sizes and all(bool(condition.xreplace({symbol: sympy.Integer(other)})) for condition in conditions)

    return _Version(compiled, results, accepts)


def _nested(structure: TreeSpec, constants: Sequence[Any], places: Sequence[int], tensors: Sequence[Any]) -> Any:
    leaves = [*constants]
    for place, tensor in zip(places, tensors, strict=True):
        leaves[place] = tensor
    return tree_unflatten(leaves, structure)


def compile_limit() -> dict[str, Any]:
    """The argument of ``torch.compile`` that raises the number of versions of a function, if this torch has it."""
    return {"recompile_limit": _VERSIONS} if "recompile_limit" in inspect.signature(torch.compile).parameters else {}
