"""Compares an attention backend with float32 on the CPU, because kernels of some GPUs were wrong.

Early ROCm builds of PyTorch ignored windows of packed samples, or read the value for no window as one.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from isthmus.engine.attention.backends.blocks import packed_attention
from isthmus.engine.attention.backends.registry import BACKENDS, AttentionNeeds
from isthmus.engine.decoder_config import BackendName
from isthmus.engine.kernel_check import TOLERANCE, relative_errors
from isthmus.engine.parallel.context_parallel import Spans, local_tokens

_LENGTHS = (200, 1, 77, 300, 62)
"""Not multiples of a block of any kernel."""
SHORT_TOKENS = sum(_LENGTHS)
_WINDOW = 70
_SPANS = ((40, 120), (190, 290), (500, 640))
"""Parts of samples and whole samples."""
_PARTS = 16
"""Parts of a long sequence whose errors are compared: outputs shrink with the number of keys."""


class CheckResult(NamedTuple):
    forward: float
    """Largest error of the output, relative to its largest value."""
    backward: float
    """Largest error of a gradient."""
    failure: str | None
    """None: the errors are small."""


@functools.cache
def self_check(name: BackendName, needs: AttentionNeeds, flash: str = "", tokens: int = 0) -> CheckResult:
    """Run forward and backward on random samples with the heads of the model; once per process.

    ``flash`` is the active version of flash attention, if it is not that of torch. ``tokens`` is the length of the
    packed sequences of a run: kernels may fail for many keys only. Then the reference is computed on the same device.
    """
    try:
        windows = (None, _WINDOW) if needs.window else (None,)
        packings = _packings(tokens, BACKENDS[name].one_sample_tokens)
        errors = torch.tensor([_errors(name, needs, window, lengths) for lengths in packings for window in windows])
    except Exception as error:  # of torch, the compiler or Triton: the next backend is tried
        reason = str(error).strip().partition("\n")[0]
        return CheckResult(
            math.nan, math.nan, f"its self-check{_at(tokens)} failed with {type(error).__name__}: {reason}"
        )
    forward, backward = float(errors[:, 0].max()), float(errors[:, 1:].max())  # NaN if any is
    allowed = TOLERANCE[needs.dtype]
    if forward <= allowed and backward <= allowed:
        return CheckResult(forward, backward, None)
    reason = f"its errors{_at(tokens)} against float32 are {forward:.2g} forward and {backward:.2g} backward"
    return CheckResult(forward, backward, f"{reason}, above {allowed:g}")


def _at(tokens: int) -> str:
    return f" at {tokens} tokens" if tokens else ""


def _packings(tokens: int, one_sample_tokens: int | None) -> list[tuple[int, ...]]:
    """Lengths of samples; with ``one_sample_tokens`` also one sample, of a multiple of this number."""
    several = (tokens - tokens // 4 - 1, 1, tokens // 4) if tokens else _LENGTHS
    if one_sample_tokens is None:
        return [several]
    multiple = max(1, (tokens or SHORT_TOKENS) // one_sample_tokens) * one_sample_tokens
    return [several, (multiple,)]


def _errors(name: BackendName, needs: AttentionNeeds, window: int | None, lengths: tuple[int, ...]) -> list[float]:
    """Errors of the output and each gradient."""
    random = torch.Generator().manual_seed(0)
    heads, tokens = needs.groups * needs.repeat, sum(lengths)
    is_long = tokens > SHORT_TOKENS
    spans: Spans | None = _SPANS if needs.cp else None
    spans = spans and tuple((start * tokens // SHORT_TOKENS, end * tokens // SHORT_TOKENS) for start, end in spans)
    shapes = {
        "q": (needs.groups, needs.repeat, needs.key_width),
        "k": (needs.groups, needs.key_width),
        "v": (needs.groups, needs.value_width),
        "upstream": (needs.groups, needs.repeat, needs.value_width),
    }
    inputs = {n: torch.randn(sum(lengths), *shape, generator=random).to(needs.dtype) for n, shape in shapes.items()}
    inputs |= {n: local_tokens(inputs[n], spans) for n in ("q", "upstream")}
    if needs.sinks:
        inputs["sinks"] = torch.randn(heads, generator=random).to(needs.dtype)

    def run(attend: Callable[..., Tensor], device: str, dtype: torch.dtype) -> list[Tensor]:
        tensors = {n: x.to(device, dtype, copy=True).requires_grad_(n != "upstream") for n, x in inputs.items()}
        options = {"scale": needs.scale, "softcap": needs.softcap, "sinks": tensors.get("sinks"), "spans": spans}
        with torch.enable_grad():
            out = attend(
                *(tensors[n] for n in "qkv"), lengths, window, **{n: x for n, x in options.items() if x is not None}
            )
            leaves = [x for n, x in tensors.items() if n != "upstream"]
            return [out.detach(), *torch.autograd.grad(out, leaves, tensors["upstream"])]

    results = run(BACKENDS[name].attend, needs.device, needs.dtype)
    if isinstance(results[0], FakeTensor):  # without values
        return [0.0] * len(results)
    references = run(packed_attention, needs.device if is_long else "cpu", torch.float32)
    if is_long:
        return [_error_of_parts(a, b) for a, b in zip(results, references, strict=True)]
    errors: list[float] = relative_errors(results, references).tolist()
    return errors


def _error_of_parts(result: Tensor, reference: Tensor) -> float:
    """Largest relative error of a part of the rows, in the Frobenius norm; gradients of keys without queries are 0."""
    parts = zip(result.float().chunk(_PARTS), reference.chunk(_PARTS), strict=True)
    return float(torch.stack([(a - b).norm() / b.norm().clamp_min(1e-30) for a, b in parts]).max())
