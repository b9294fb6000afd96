"""Adapters of routed experts: in every layout trained like in one process, saved, and resumed in another layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ranks.rank_pool import RankPool
from ranks.test_lora import assert_same
from ranks.tiny import build_model_folder

STEPS = 4
LORA: dict[str, Any] = {"rank": 4, "alpha": 16}


def test_layouts_train_and_resume_as_one_process(
    one_rank: RankPool, two_ranks: RankPool, samples: Path, tmp_path: Path
) -> None:
    """GPT-OSS: the rows of gate and up projection alternate."""
    model = build_model_folder(tmp_path / "model", "gpt_oss", num_hidden_layers=2)
    settings = {"model": model, "samples": samples, "steps": STEPS, "micro_batch_size": 2, "lora": LORA}
    truth = one_rank.run("ranks.tasks.train", **settings)
    saved = two_ranks.run("ranks.tasks.train", **settings, ep=2, save_at=[2], root=tmp_path)
    assert_same(saved, truth)
    same = two_ranks.run("ranks.tasks.train", **settings, ep=2, resume=tmp_path / "iter_0000002")
    assert same["loss"] == saved["loss"][2:] and same["digest"] == saved["digest"]
    for layout in ({"tp": 2, "etp": 1}, {"tp": 2, "etp": 1, "ep": 2}, {"etp": 2}):
        assert_same(
            two_ranks.run("ranks.tasks.train", **settings, resume=tmp_path / "iter_0000002", **layout), truth, 2
        )
