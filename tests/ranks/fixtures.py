"""The rank pools of a test file, and the tiny models and samples of a test process.

Pools are closed after each file, which frees the memory and the threads of their process groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ranks.rank_pool import RankPool
from ranks.tiny import build_model_folder, build_samples


def _world(size: int, factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    world = RankPool(size, factory.mktemp(f"world-of-{size}"))
    yield world
    world.close()


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    """A single rank in a separate process, so that other tests run without the CPU adapter."""
    yield from _world(1, tmp_path_factory)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    yield from _world(2, tmp_path_factory)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPool]:
    yield from _world(4, tmp_path_factory)


@pytest.fixture(scope="module")
def worlds(one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool) -> dict[int, RankPool]:
    """Rank pools by size."""
    return {1: one_rank, 2: two_ranks, 4: four_ranks}


@pytest.fixture(scope="session")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved SampleStore; see :func:`ranks.tiny.build_samples`."""
    return build_samples(tmp_path_factory.mktemp("samples") / "store")


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Model folders that together cover all features of dense decoders; virtual stages need four layers."""
    root = tmp_path_factory.mktemp("models")
    settings = {
        "qwen3-tied": ("qwen3", True, 2),
        "qwen2-untied": ("qwen2", False, 2),
        "llama-tied": ("llama", True, 2),
        "four-layers": ("qwen3", True, 4),
    }
    return {
        name: build_model_folder(root / name, family, tie_word_embeddings=tied, num_hidden_layers=layers)
        for name, (family, tied, layers) in settings.items()
    }
