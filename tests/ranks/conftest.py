"""Tests of several processes run one after another in one worker, where they share those processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.fixtures import four, models, one, samples, two, worlds

__all__ = ["four", "models", "one", "samples", "two", "worlds"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.ranks)
            if config.pluginmanager.hasplugin("xdist"):
                item.add_marker(pytest.mark.xdist_group("ranks"))
