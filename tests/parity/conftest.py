"""Fixtures of multi-process tests: the tests of a file share their rank pools."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.fixtures import four_ranks, models, one_rank, samples, two_ranks, worlds

__all__ = ["four_ranks", "models", "one_rank", "samples", "two_ranks", "worlds"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ranks)
