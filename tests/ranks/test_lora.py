"""Adapters in every parallel layout: trained like in one process, saved and resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.test_layouts import CURVES, TOLERANCE, max_relative_difference
from ranks.tiny import build_model_folder

STEPS = 6
LORA: dict[str, Any] = {"rank": 4, "alpha": 16}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "qwen3": build_model_folder(root / "qwen3", "qwen3", tie_word_embeddings=False),
        "latent": build_model_folder(root / "latent", "deepseek_v3", first_k_dense_replace=4),
    }


@pytest.fixture(scope="module")
def alone(one: RankPool, folders: dict[str, Path], samples: Path) -> dict[str, dict[str, Any]]:
    """Runs of one process, by model."""
    return {
        name: one.run("ranks.tasks.train", model=folder, samples=samples, steps=STEPS, micro_batch_size=2, lora=LORA)
        for name, folder in folders.items()
    }


def assert_same(run: dict[str, Any], truth: dict[str, Any]) -> None:
    differences = {curve: max_relative_difference(run[curve], truth[curve]) for curve in CURVES}
    print(differences)
    assert max(differences.values()) < TOLERANCE


def test_adapters_reduce_the_loss(alone: dict[str, dict[str, Any]]) -> None:
    for run in alone.values():
        print(run["loss"])
        assert run["loss"][-1] < run["loss"][0]


@pytest.mark.parametrize("layout", [{"tp": 2, "sp": False}, {"tp": 2, "sp": True}, {"pp": 2}, {}, {"cp": 2}])
@pytest.mark.parametrize("model", ["qwen3", "latent"])
def test_layouts_train_as_one_process(
    model: str, layout: dict[str, Any], two: RankPool, folders: dict[str, Path], samples: Path, alone: dict[str, Any]
) -> None:
    run = two.run(
        "ranks.tasks.train", model=folders[model], samples=samples, steps=STEPS, micro_batch_size=2, lora=LORA, **layout
    )
    assert_same(run, alone[model])
