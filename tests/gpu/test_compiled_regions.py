"""Compiled norms, activations, rotary embeddings and dropout on a GPU: the results of the eager code on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from isthmus.engine.compiled import choose_compile, compiled_versions, set_compile
from unit.engine.test_compiled_regions import CASES, WIDTH, results

pytestmark = pytest.mark.gpu
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 3e-2}


@pytest.fixture(autouse=True)
def compiled() -> Iterator[None]:
    line = choose_compile("auto", "cuda")
    if line is None or not line.startswith("compile: on"):
        pytest.skip(str(line))
    compiled_versions.clear()
    yield
    set_compile(False)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", TOLERANCES)
def test_compiled_regions(case: str, dtype: torch.dtype, record_property: Callable[[str, object], None]) -> None:
    """Gradients of weights are sums over the tokens, so tolerances are relative to the largest value.

    How often a length was compiled is reported: it depends on the version of torch, and no result does on it.
    """
    for length in (5, 700, WIDTH):
        for mine, expected in zip(results(case, length, "cuda", dtype), results(case, length), strict=True):
            assert mine.dtype == dtype
            error = (mine.cpu().float() - expected).abs().max()
            assert error <= TOLERANCES[dtype] * expected.abs().max(), (length, error)
    record_property("graphs", compiled_versions.total())
