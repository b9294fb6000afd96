"""Rank pools and tolerances for the platform of this machine.

Tests without the ``gpu`` mark also run on a CPU, which shows that the tests themselves are right.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ranks.fixtures import samples
from ranks.rank_pool import RankPool

__all__ = ["one_rank", "samples", "tolerance", "two_ranks"]

ON_GPU = torch.cuda.is_available()


def _world(size: int, factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    world = RankPool(size, factory.mktemp(f"world-of-{size}"), platform="auto" if ON_GPU else "cpu")
    yield world
    world.close()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """A single rank: on a GPU a world of one over NCCL or RCCL."""
    yield from _world(1, tmp_path_factory)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """Two ranks, on a GPU each."""
    if ON_GPU and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs: NCCL and RCCL refuse two ranks on one")
    yield from _world(2, tmp_path_factory)


@pytest.fixture(scope="session")
def tolerance() -> float:
    """Relative difference of float32 results in another order of summation; GPU kernels sum in parallel."""
    return 1e-4 if ON_GPU else 1e-5
