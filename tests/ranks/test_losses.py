"""Losses of vocabulary shards equal those of torch on whole logits, and runs with them do not depend on the layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.test_layouts import assert_same

TRAIN = "ranks.tasks.train"


@pytest.mark.parametrize("ranks", [1, 2])
def test_smoothed_labels_equal_torch(ranks: int, worlds: dict[int, RankPool]) -> None:
    assert max(worlds[ranks].run("ranks.loss_tasks.smoothed_loss", rate=0.1)) < 2e-6


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("ranks", [1, 2])
def test_policy_values_of_vocabulary_shards(ranks: int, softcap: float | None, worlds: dict[int, RankPool]) -> None:
    task = "ranks.loss_tasks.policy_values_of_shard"
    assert max(worlds[ranks].run(task, softcap=softcap, temperature=0.7)) < 2e-6


def test_distillation_of_vocabulary_shards(two_ranks: RankPool) -> None:
    cases = [
        {"beta": beta, "top_k": top_k, "temperature": temperature, "sft_weight": 0.3}
        for beta, top_k, temperature in ((0.0, 5, 1.0), (0.5, None, 2.0), (1.0, 5, 2.0), (0.5, 200, 1.0))
    ]
    assert max(two_ranks.run("ranks.loss_tasks.distilled_loss", cases=cases)) < 1e-5


def test_label_smoothing_in_layouts(
    one_rank: RankPool, two_ranks: RankPool, models: dict[str, Path], samples: Path
) -> None:
    """The training loss is smoothed, the validation loss is not."""
    run: dict[str, Any] = {"model": models["llama-tied"], "samples": samples, "steps": 2, "evaluate": True}
    plain = one_rank.run(TRAIN, **run)
    alone = one_rank.run(TRAIN, more={"label_smoothing": 0.2}, **run)
    assert alone["valid_before"] == plain["valid_before"] and alone["valid_after"] != plain["valid_after"]
    assert alone["loss"][0] != pytest.approx(plain["loss"][0], rel=1e-3)
    assert_same(two_ranks.run(TRAIN, more={"label_smoothing": 0.2}, tp=2, sp=True, **run), alone)
