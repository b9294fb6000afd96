"""Times of matmuls as the engine calls them."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TypeVar

import torch
from torch import Tensor

from isthmus.engine.linear.matmul import add_matmul, matmul
from isthmus.engine.loss import cross_entropy_cpu, cross_entropy_gpu
from isthmus.recipes.plan.step_matmuls import OUTPUT, StepMatmul

Name = TypeVar("Name")
SECONDS = 0.4
"""Time for a candidate of a matmul, if it runs often enough."""
LEAST_ROUNDS, MOST_ROUNDS = 3, 50
MARGIN = 0.97
"""A candidate replaces the default if it takes at most this share of its time; differences below are noise."""
TOLERANCE: Mapping[torch.dtype, float] = {torch.float32: 1e-4, torch.bfloat16: 0.02, torch.float16: 0.005}
"""Relative difference from the default's result, above rounding."""


class Operands:
    """The tensors of one matmul. Logits have the memory layout that the loss gives them."""

    def __init__(self, matmul: StepMatmul, device: torch.device) -> None:
        shape = matmul.shape
        self.adds: bool = matmul.shape.operation == "add_matmul"
        logits = matmul.weight == OUTPUT
        like = torch.empty(0, dtype=shape.dtype, device=device)

        def empty(rows: int, columns: int, *, is_logits: bool = False) -> Tensor:
            if is_logits:
                module = cross_entropy_cpu if device.type == "cpu" else cross_entropy_gpu
                return module.new_buffer(rows, columns, like=like)
            return like.new_empty(rows, columns)

        self.b: Tensor = empty(shape.n, shape.k).t() if shape.transposed else empty(shape.k, shape.n)
        if self.adds:
            self.a: Tensor = empty(shape.k, shape.m, is_logits=logits).t()
            self.out: Tensor | None = torch.zeros(shape.m, shape.n, device=device)
        else:
            self.a = empty(shape.m, shape.k, is_logits=logits and not shape.transposed)
            self.out = empty(shape.m, shape.n, is_logits=shape.transposed) if logits else None
        self.a.normal_()
        self.b.normal_()

    def run(self) -> Tensor:
        """The product, or the float32 sum that it is added to."""
        if self.adds:
            assert self.out is not None
            add_matmul(self.out, self.a, self.b)
            return self.out
        return matmul(self.a, self.b, out=self.out)

    def result(self) -> Tensor:
        """A new tensor, of one product."""
        if self.adds and self.out is not None:
            self.out.zero_()
        return self.run().clone()


def compare(
    operands: Operands,
    candidates: Mapping[Name, Callable[[], AbstractContextManager[object]]],
    *,
    seconds: float,
) -> dict[Name, float]:
    """Median milliseconds of each candidate, in rounds so that noise affects all of them alike.

    A candidate is a context. The first one is the default. Others are left out if they fail, or if their results differ
    from its result.
    """
    dtype, expected = operands.a.dtype, None
    usable: dict[Name, Callable[[], AbstractContextManager[object]]] = {}
    for name, context in candidates.items():
        try:
            with context():
                result = operands.result()
        except RuntimeError:
            if expected is None:
                raise
            continue
        expected = result if expected is None else expected
        if _difference(result, expected) <= TOLERANCE[dtype]:
            usable[name] = context
    times: dict[Name, list[float]] = {name: [] for name in usable}
    deadline = time.perf_counter() + seconds
    for done in range(MOST_ROUNDS):
        for name, context in usable.items():
            with context():
                times[name].append(_milliseconds(operands))
        if done + 1 >= LEAST_ROUNDS and time.perf_counter() > deadline:
            break
    return {name: statistics.median(durations) for name, durations in times.items()}


def _milliseconds(operands: Operands) -> float:
    """On a GPU of several calls, so that the time of a launch does not count."""
    on_gpu = operands.a.is_cuda
    calls = 10 if on_gpu else 1
    if on_gpu:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        operands.run()
    if on_gpu:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e3


def _difference(result: Tensor, expected: Tensor) -> float:
    """In the Frobenius norm, relative."""
    scale = float(expected.float().norm())
    return 0.0 if result is expected else float((result.float() - expected.float()).norm()) / max(scale, math.ulp(0.0))
