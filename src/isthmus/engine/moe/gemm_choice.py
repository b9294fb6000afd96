"""The timed choice between ``grouped_mm`` and a loop of GEMMs for the experts, at the start of a run on a GPU.

torch 2.13 has kernels for sm_90 and sm_100. On other GPUs, and on ROCm by default, ``grouped_mm`` is a loop that waits
for the group sizes in each call; the loop here reads them once per layer. Where there is a kernel the loop may still
win: with few large experts, and in weight gradients, because its GEMM adds to float32.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from isthmus.engine.moe.grouped_gemm import (
    GemmKernels,
    GroupSizes,
    add_gradients,
    grouped_matmul,
    unsupported_reason,
)
from isthmus.engine.moe.moe_layer import GroupedExperts

REPEATS = 5
TIMED_EXPERTS = 8
"""Experts in a trial, with as many rows each as in the run: weights and gradients of 128 experts, once more, may not
fit into memory."""
TOLERANCE = 0.02
"""Relative difference of the results, above the rounding of bfloat16."""


@dataclass(frozen=True, slots=True)
class Timing:
    name: str
    kernel_ms: float
    loop_ms: float
    difference: float
    """Relative difference of the results; NaN if one is not finite, infinite if ``grouped_mm`` fails."""

    @property
    def kernel(self) -> bool:
        """Whether ``grouped_mm`` is chosen."""
        return self.difference < TOLERANCE and self.kernel_ms <= self.loop_ms

    def __str__(self) -> str:
        if self.difference == math.inf:
            return f"{self.name} by a loop of GEMMs, because grouped_mm fails on this GPU"
        if not self.difference < TOLERANCE:
            return f"{self.name} by a loop of GEMMs, because results of grouped_mm differ by {self.difference:.0%}"
        kernel, loop = ("grouped_mm", self.kernel_ms), ("a loop of GEMMs", self.loop_ms)
        (chosen, fast), (other, slow) = (kernel, loop) if self.kernel else (loop, kernel)
        return f"{self.name} by {chosen} ({fast:.2f} ms, {other} {slow:.2f} ms)"


def choose_gemms(model: nn.Module, rows: int, dtype: torch.dtype) -> tuple[str, ...]:
    """Set the faster GEMMs of all experts for about ``rows`` routed tokens per layer; returns messages for the user.

    ``dtype`` is that of the activations. Experts on a CPU always use the loop.
    """
    messages: dict[str, None] = {}
    for experts in (module for module in model.modules() if isinstance(module, GroupedExperts)):
        first, number = experts.local_experts[0], len(experts.local_experts)
        weights = first.linear_fc1.weight, first.linear_fc2.weight
        if not weights[0].is_cuda:
            continue
        shapes = tuple((weight.size(0), weight.size(1)) for weight in weights)
        reason = unsupported_reason(shapes[0], dtype) or unsupported_reason(shapes[1], dtype)
        if torch.are_deterministic_algorithms_enabled():
            experts.kernels = GemmKernels(matmul=False, weight_gradient=False)
            reason = "train.deterministic=true excludes a choice by time"
        elif reason is None and isinstance(weights[0].data, FakeTensor):
            continue
        how = f"a loop of GEMMs, because {reason}"
        if reason is None:
            timings = _timings(number, shapes, max(rows, number), weights[0].device)
            if timings is None:
                experts.kernels = GemmKernels(matmul=False, weight_gradient=False)
                how = "a loop of GEMMs, which needs less memory: a trial of both ran out of GPU memory"
            else:
                experts.kernels = GemmKernels(*(timing.kernel for timing in timings))
                how = "; ".join(map(str, timings))
        messages[f"experts: {number} of {' and '.join(f'{n} x {k}' for n, k in shapes)}: {how}"] = None
    return tuple(messages)


def _timings(
    number: int, shapes: tuple[tuple[int, int], ...], rows: int, device: torch.device
) -> tuple[Timing, Timing] | None:
    """Timings with at most TIMED_EXPERTS experts, whose memory is free afterwards; None: it was not enough."""
    timed = min(number, TIMED_EXPERTS)
    try:
        return time_gemms(timed, shapes, rows * timed // number, device)
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


@functools.cache
def time_gemms(
    number: int, shapes: tuple[tuple[int, int], ...], rows: int, device: torch.device
) -> tuple[Timing, Timing]:
    """Time matmuls and weight gradients with ``number`` random weights [N, K] of each of the ``shapes``."""
    each, rest = divmod(rows, number)
    # The first group is empty: kernels had faults there.
    counts = torch.tensor([rows] if number == 1 else [0, *[each] * (number - 2), 2 * each + rest], device=device)
    operands = [_Operands(number, shape, counts, rows) for shape in shapes]
    return (
        _time("matmuls", lambda kernel: [operand.matmul(kernel) for operand in operands]),
        _time("weight gradients", lambda kernel: [one for operand in operands for one in operand.gradients(kernel)]),
    )


class _Operands:
    def __init__(self, number: int, shape: tuple[int, int], counts: Tensor, rows: int) -> None:
        generator = torch.Generator(counts.device).manual_seed(0)  # leaves the run's random state alone

        def random(*size: int) -> Tensor:
            return torch.randn(size, generator=generator, dtype=torch.bfloat16, device=counts.device)

        self.x, self.grad = random(rows, shape[1]), random(rows, shape[0])
        self.weights = random(number, *shape).unbind()
        self.targets = torch.zeros(number, *shape, device=counts.device).unbind()
        self.counts, self.sizes = counts, GroupSizes(counts, counts.tolist())

    def matmul(self, kernel: bool) -> Tensor:
        """The loop reads the sizes, as it has to in a forward pass."""
        return grouped_matmul(self.x, GroupSizes(self.counts), self.weights, transposed=True, kernel=kernel)

    def gradients(self, kernel: bool) -> Iterable[Tensor]:
        torch._foreach_zero_(self.targets)
        add_gradients(self.targets, self.grad, self.x, self.sizes, kernel=kernel)
        return self.targets


def _time(name: str, run: Callable[[bool], list[Tensor]]) -> Timing:
    expected = [tensor.clone() for tensor in run(False)]
    loop_ms = _milliseconds(lambda: run(False))
    try:
        difference = _difference(run(True), expected)
        return Timing(name, _milliseconds(lambda: run(True)), loop_ms, difference)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return Timing(name, math.inf, loop_ms, math.inf)


def _difference(results: list[Tensor], expected: list[Tensor]) -> float:
    """In the Frobenius norm."""
    squares = sum((a.float() - b.float()).square().sum() for a, b in zip(results, expected, strict=True))
    return math.sqrt(float(squares / sum(b.float().square().sum() for b in expected)))


def _milliseconds(run: Callable[[], object]) -> float:
    """On the clock of the host, which waits for the GPU: launches and copies count."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(REPEATS):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / REPEATS * 1e3
