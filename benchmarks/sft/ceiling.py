"""Measures the matmul speed of this machine, which is the ceiling of any training step.

Three rates per precision. ``gflops`` is the best over square sizes and the model's shapes, of ``torch.mm`` or of the
library that Isthmus chooses, whichever is faster. ``own_shapes_gflops`` is the rate of a step that consists of the
model's matmuls alone, each at its best speed; it is lower, since the model's dimensions are small.
``torch_mm_gflops`` is the best of ``torch.mm``, which all other contestants use.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rounds import CpuWatch, turn_files
from torch import Tensor

from isthmus.engine.linear.matmul import matmul
from isthmus.platforms.detect import detect

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def linear_layers(spec: dict[str, Any]) -> Iterator[tuple[str, int, int, int, float]]:
    """(name, tokens, inputs, outputs, times per step) of each linear layer, for one micro batch of full sequences."""
    shape = spec["shape"]
    hidden, ffn, layers = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    heads = shape["num_attention_heads"] * shape["head_dim"]
    groups = shape["num_key_value_heads"] * shape["head_dim"]
    tokens = spec["tokens"]
    yield "qkv", tokens, hidden, heads + 2 * groups, layers
    yield "proj", tokens, heads, hidden, layers
    yield "fc1", tokens, hidden, 2 * ffn, layers
    yield "fc2", tokens, ffn, hidden, layers
    loss_tokens = max(1, round(tokens * spec["loss_token_share"]))
    yield "head", loss_tokens, hidden, shape["vocab_size"], 1


def turns_s(a: Tensor, b: Tensor, budget_s: float) -> tuple[list[float], list[float]]:
    """Times of ``a @ b`` with ``torch.mm`` and with the library that Isthmus chooses, alternating for ``budget_s``."""
    out = torch.mm(a, b)
    ways = (lambda: torch.mm(a, b, out=out), lambda: matmul(a, b, out=out))
    times_s: tuple[list[float], list[float]] = ([], [])
    stop_s = time.perf_counter() + budget_s
    while len(times_s[0]) < 3 or (time.perf_counter() < stop_s and len(times_s[0]) < 200):
        for multiply, into in zip(ways, times_s, strict=True):
            started_s = time.perf_counter()
            multiply()
            into.append(time.perf_counter() - started_s)
    return times_s


def best_gflops(a: Tensor, b: Tensor, budget_s: float) -> tuple[float, float]:
    """The best rate of ``a @ b`` in 10^9 operations a second: with ``torch.mm``, and with the faster of both."""
    by_torch_s, by_choice_s = (min(times) for times in turns_s(a, b, budget_s))
    flops = 2.0 * a.size(0) * a.size(1) * b.size(1)
    return flops / by_torch_s / 1e9, flops / min(by_torch_s, by_choice_s) / 1e9


def layouts(tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """The three matmuls of a linear layer: forward, gradient of the input, gradient of the weight."""
    x, weight, grad = (
        random_matrix(tokens, inputs, dtype),
        random_matrix(outputs, inputs, dtype),
        random_matrix(tokens, outputs, dtype),
    )
    return {"forward": (x, weight.t()), "grad_x": (grad, weight), "grad_w": (grad.t(), x)}


def random_matrix(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """A matrix of random numbers."""
    return torch.randn(rows, columns).to(dtype)


def measure(spec: dict[str, Any]) -> dict[str, Any]:
    """The ceiling at one precision."""
    dtype, budget_s = DTYPES[spec["precision"]], float(spec["budget_s"])
    detect("cpu").prepare_process()  # the allocator keeps memory, as in a run
    watch = CpuWatch()
    rates = {
        f"{n}x{n}x{n}": best_gflops(random_matrix(n, n, dtype), random_matrix(n, n, dtype), budget_s)
        for n in spec["squares"]
    }
    flops = seconds = 0.0
    for name, tokens, inputs, outputs, times in linear_layers(spec):
        for way, (a, b) in layouts(tokens, inputs, outputs, dtype).items():
            rate = best_gflops(a, b, budget_s)
            rates[f"{name} {way} {a.size(0)}x{a.size(1)}x{b.size(1)}"] = rate
            work = 2.0 * tokens * inputs * outputs * times
            flops, seconds = flops + work, seconds + work / rate[1] / 1e9
    cpu = watch.shares()
    by_torch, best = (max(rate[way] for rate in rates.values()) for way in (0, 1))
    model_gflops = flops / seconds / 1e9
    others = f"others had {cpu['others_cpu_use']:.0%} of the cores"
    return cpu | {
        "gflops": best,
        "own_shapes_gflops": model_gflops,
        "torch_mm_gflops": by_torch,
        "torch_mm_and_best_gflops": rates,
        "line": f"{best:8.1f} GFLOP/s, torch.mm {by_torch:.1f}, the model's shapes {model_gflops:.1f}  {others}",
    }


if __name__ == "__main__":
    spec, result_file = turn_files()
    Path(result_file).write_text(json.dumps(measure(spec)))
