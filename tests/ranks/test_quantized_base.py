"""Adapters of a quantized base: trained like in one process in every layout, saved, and resumed in another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from optional_packages import bitsandbytes
from ranks.rank_pool import RankPool
from ranks.test_lora import assert_same
from ranks.tiny import build_model_folder

pytestmark = bitsandbytes.required
STEPS = 4
LORA: dict[str, Any] = {"rank": 4, "alpha": 16, "quantize": "nf4"}
BLOCKS = {"hidden_size": 128, "head_dim": 64, "moe_intermediate_size": 128, "num_hidden_layers": 2}
"""Two ranks have columns that are multiples of a block."""


def test_layouts_train_and_resume_as_one_process(
    one_rank: RankPool, two_ranks: RankPool, samples: Path, tmp_path: Path
) -> None:
    model = build_model_folder(tmp_path / "model", "qwen3_moe", **BLOCKS)
    nf4 = {"model": model, "samples": samples, "steps": STEPS, "micro_batch_size": 2, "lora": LORA}
    truth = one_rank.run("ranks.tasks.train", **nf4)
    saved = two_ranks.run("ranks.tasks.train", **nf4, tp=2, save_at=[2], root=tmp_path)
    assert_same(saved, truth)
    same = two_ranks.run("ranks.tasks.train", **nf4, tp=2, resume=tmp_path / "iter_0000002")
    assert same["loss"] == saved["loss"][2:] and same["digest"] == saved["digest"]
    for layout in ({"pp": 2}, {"ep": 2}):
        assert_same(two_ranks.run("ranks.tasks.train", **nf4, resume=tmp_path / "iter_0000002", **layout), truth, 2)
