"""Attention of a layer of Llama 3.1 8B in each backend, forward and backward: one sample, 16 samples, a window."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from gpu_turns.rows import append

HEADS, GROUPS, WIDTH = 32, 8, 128


def run(spec: dict[str, Any]) -> None:
    """Append a row for each backend and case; a backend that cannot compute a case has the reason."""
    import torch

    from isthmus.engine.attention.backends.registry import BACKENDS, AttentionNeeds
    from isthmus.platforms.detect import detect
    from isthmus.platforms.environment import apply_env
    from isthmus.tools.doctor import measurements

    platform = detect(spec["platform"])
    apply_env(platform)
    platform.prepare_process()
    device, tokens = torch.device(platform.device_type), 64 if spec["dry"] else 8192
    measurements.SECONDS = 0.0 if spec["dry"] else 0.5
    cases = {
        "1 sample": ((tokens,), None),
        "16 samples": ((tokens // 16,) * 16, None),
        "window": ((tokens,), tokens // 8),
    }
    for case, (lengths, window) in cases.items():
        needs = AttentionNeeds(
            device=device.type, dtype=torch.bfloat16, groups=GROUPS, repeat=HEADS // GROUPS, key_width=WIDTH,
            value_width=WIDTH, window=window is not None,
        )  # fmt: skip
        for name, backend in BACKENDS.items():
            row = {"backend": name, "case": case, "tokens": tokens, "ms": None, "tflops": None}
            try:
                why = backend.unsupported(needs)
                if why is None:
                    attend = partial(backend.attend, lengths=lengths, window=window)
                    seconds = measurements.median_seconds(_step(attend, tokens, device), device)
                    row |= {"ms": 1e3 * seconds, "tflops": flops(lengths, window) / seconds / 1e12}
            except Exception as error:  # of torch, the compiler or the device: the other backends are measured
                why = f"{type(error).__name__}: {error}"[:200]
            append("attention", **row, why=why)


def flops(lengths: tuple[int, ...], window: int | None) -> float:
    """Of both matmuls of the forward pass and the five of the backward pass, for the keys that queries attend to."""
    pairs = sum(sum(min(query + 1, window or length) for query in range(length)) for length in lengths)
    return 3.5 * 4 * HEADS * WIDTH * float(pairs)


def _step(attend: Callable[..., Any], tokens: int, device: Any) -> Callable[[], object]:
    import torch

    shapes = ((GROUPS, HEADS // GROUPS, WIDTH), (GROUPS, WIDTH), (GROUPS, WIDTH))
    q, k, v = (torch.randn(tokens, *shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    upstream, inputs = torch.randn_like(q), [x.requires_grad_() for x in (q, k, v)]
    return lambda: torch.autograd.grad(attend(*inputs), inputs, upstream)
