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

from isthmus.engine.attention.backends.backends import BACKENDS, AttentionNeeds, BackendName
from isthmus.engine.attention.backends.packed_attention_cpu import packed_attention
from isthmus.engine.parallel.context_parallel import Spans, local_tokens

TOLERANCE = {torch.float32: 2e-3, torch.float16: 1e-2, torch.bfloat16: 4e-2}
"""Largest error of an output or gradient, relative to its largest value. A wrong mask gives about 1."""
_LENGTHS = (200, 1, 77, 300, 62)
"""Not multiples of a block of any kernel."""
_WINDOW = 70
_SPANS = ((40, 120), (190, 290), (500, 640))
"""Parts of samples and whole samples."""


class CheckResult(NamedTuple):
    forward: float
    """Largest error of the output, relative to its largest value."""
    backward: float
    """Of the gradients."""
    failure: str | None
    """None: the errors are small."""


@functools.cache
def self_check(name: BackendName, needs: AttentionNeeds, flash: str = "") -> CheckResult:
    """Run forward and backward on small random samples with the heads of the model; once per process.

    ``flash`` is the active version of flash attention, if it is not that of torch.
    """
    try:
        windows = (None, _WINDOW) if needs.window else (None,)
        errors = torch.tensor([_errors(name, needs, window, _SPANS if needs.cp else None) for window in windows])
    except Exception as error:  # of torch, the compiler or Triton: the next backend is tried
        reason = str(error).strip().partition("\n")[0]
        return CheckResult(math.nan, math.nan, f"its self-check failed with {type(error).__name__}: {reason}")
    forward, backward = float(errors[:, 0].max()), float(errors[:, 1:].max())  # NaN if any is
    allowed = TOLERANCE[needs.dtype]
    if forward <= allowed and backward <= allowed:
        return CheckResult(forward, backward, None)
    reason = f"its errors against float32 are {forward:.2g} forward and {backward:.2g} backward, above {allowed:g}"
    return CheckResult(forward, backward, reason)


def _errors(name: BackendName, needs: AttentionNeeds, window: int | None, spans: Spans | None) -> list[float]:
    """Of the output and each gradient."""
    random = torch.Generator().manual_seed(0)
    heads, tokens = needs.groups * needs.repeat, sum(_LENGTHS)
    shapes = {
        "q": (needs.groups, needs.repeat, needs.key_width),
        "k": (needs.groups, needs.key_width),
        "v": (needs.groups, needs.value_width),
        "upstream": (needs.groups, needs.repeat, needs.value_width),
    }
    given = {n: torch.randn(tokens, *shape, generator=random).to(needs.dtype) for n, shape in shapes.items()}
    given |= {n: local_tokens(given[n], spans) for n in ("q", "upstream")}
    if needs.sinks:
        given["sinks"] = torch.randn(heads, generator=random).to(needs.dtype)

    def run(attend: Callable[..., Tensor], device: str, dtype: torch.dtype) -> list[Tensor]:
        own = {n: x.to(device, dtype, copy=True).requires_grad_(n != "upstream") for n, x in given.items()}
        options = {"scale": needs.scale, "softcap": needs.softcap, "sinks": own.get("sinks"), "spans": spans}
        with torch.enable_grad():
            out = attend(
                *(own[n] for n in "qkv"), _LENGTHS, window, **{n: x for n, x in options.items() if x is not None}
            )
            leaves = [x for n, x in own.items() if n != "upstream"]
            return [out.detach(), *torch.autograd.grad(out, leaves, own["upstream"])]

    got = run(BACKENDS[name].attend, needs.device, needs.dtype)
    if isinstance(got[0], FakeTensor):  # without values
        return [0.0] * len(got)
    wanted = run(packed_attention, "cpu", torch.float32)
    return [
        float((mine.float().cpu() - own).abs().max() / own.abs().max()) for mine, own in zip(got, wanted, strict=True)
    ]
