"""Any rank of a large layout builds in seconds, and the memory estimate is that of its trace."""

from __future__ import annotations

import pytest

from fake_cuda.runner import FakeCuda
from fake_cuda.step_memory import RANKS, memory


@pytest.mark.thorough_cases(
    "70B, recomputed",
    "8B, cp",
    "8B, virtual stages",
    "MLA",
    "experts, etp",
    "experts",
    "fsdp",
    "keys as values",
    "norms of experts",
    "shared keys, layer inputs",
)
@pytest.mark.parametrize("rank", RANKS)
def test_the_estimate_is_the_traced_memory(fake_cuda: FakeCuda, rank: str) -> None:
    results = fake_cuda.run(memory, **RANKS[rank])
    estimate = results["estimate"]
    assert results["seconds"] < 15
    if rank != "fsdp":  # whose estimate has the gathered weights, which are not there between steps
        assert estimate["persistent"] == pytest.approx(results["persistent"], rel=0.02)
    assert estimate["total"] == pytest.approx(results["peak"], rel=0.1)
