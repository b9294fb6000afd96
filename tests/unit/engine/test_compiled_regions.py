"""Each layer with regions, compiled by inductor's C++ backend on this CPU: results of the eager code, for two lengths
without compiling again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.compiled import set_compile
from isthmus.engine.layers.activation import Activation, clamped_swiglu, geglu, swiglu
from isthmus.engine.layers.dropout import MLP_OUTPUT, dropout_keys, hidden_dropout
from isthmus.engine.layers.norm import LayerNorm, RMSNorm
from isthmus.engine.layers.rope import rotate, rotation_table

pytestmark = pytest.mark.processes  # the C++ compiler
WIDTH = 24


@pytest.fixture(autouse=True)
def eager_again() -> Iterator[None]:
    counters.clear()
    yield
    set_compile(False)


def randomized(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def norm(kind: Any, *, zero_centered: bool = False, **kwargs: Any) -> nn.Module:
    config: Any = SimpleNamespace(
        params_dtype=torch.float32, sequence_parallel=False, layernorm_zero_centered_gamma=zero_centered
    )
    return randomized(kind(config, WIDTH, 1e-5, **kwargs))


def rope(x: Tensor, *, interleaved: bool, pairs: int) -> Tensor:
    """Of 3 heads of 8 channels, of which 2 x ``pairs`` are rotated."""
    table = rotation_table(torch.linspace(1, 0.1, pairs), torch.arange(len(x)), torch.float32)
    return rotate(x.view(len(x), 3, 8), table, interleaved=interleaved)


def dropout(x: Tensor) -> Tensor:
    """In two layers, which must not compile twice."""
    batch = replace(PackedBatch.for_inference([torch.zeros(len(x), dtype=torch.int64)]), sample_ids=(3,))
    batch = replace(batch, dropout=dropout_keys(batch, seed=1, step=2))
    return torch.cat([hidden_dropout(x, batch, 0.3, layer=layer, place=MLP_OUTPUT) for layer in (1, 2)])


def gated(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return Activation(cast(Any, None), function=function)


CASES: dict[str, Callable[..., Any]] = {
    "RMSNorm of a sum": norm(RMSNorm, zero_centered=True),
    "LayerNorm": norm(LayerNorm, bias=True),
    "rope": partial(rope, interleaved=False, pairs=4),
    "partial interleaved rope": partial(rope, interleaved=True, pairs=3),
    "swiglu": gated(swiglu),
    "geglu": gated(partial(geglu, approximate="tanh")),
    "clamped swiglu": gated(clamped_swiglu),
    "dropout": dropout,
}


def results(case: str, length: int) -> list[Tensor]:
    """Outputs and gradients for inputs that depend only on the length."""
    generator = torch.Generator().manual_seed(length)
    compute = CASES[case]
    inputs = [
        torch.randn(length, 1, WIDTH, generator=generator, requires_grad=True) for _ in range(1 + ("sum" in case))
    ]
    outputs = compute(*inputs)
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    weighted = sum((out * torch.randn(out.shape, generator=generator)).sum() for out in outputs)
    weights = list(compute.parameters()) if isinstance(compute, nn.Module) else []
    return [*outputs, *torch.autograd.grad(weighted, [*inputs, *weights])]


@pytest.mark.parametrize("case", CASES)
def test_compiled_equals_eager_for_any_length(case: str) -> None:
    lengths = (5, 7, WIDTH)
    wanted = [results(case, length) for length in lengths]
    set_compile(True, device="cpu")
    for length, eager in zip(lengths, wanted, strict=True):
        for mine, reference in zip(results(case, length), eager, strict=True):
            torch.testing.assert_close(mine, reference, rtol=2e-6, atol=2e-6)
    # A forward and a backward region; dropout has one for both.
    assert counters["stats"]["unique_graphs"] == (1 if case == "dropout" else 2)
