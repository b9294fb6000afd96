"""fp16 and bf16 stay close to fp32 with experts, MTP layers, context parallelism and virtual stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.test_layouts import max_relative_difference
from ranks.tiny import add_mtp_layers, build_model_folder

pytestmark = pytest.mark.thorough

FP16 = {"precision": "fp16", "more": {"initial_loss_scale": 256.0}}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "expert parallel": ("experts", {**FP16, "ep": 2}),
    "pipeline with MTP layers": ("mtp", {**FP16, "pp": 2}),
    "context parallel": ("dense", {**FP16, "cp": 2}),
    "virtual stages": ("dense", {"precision": "bf16", "pp": 2, "vpp": 2}),
}


def test_precision_follows_fp32(one_rank: RankPool, two_ranks: RankPool, samples: Path, tmp_path: Path) -> None:
    two_layers: dict[str, Any] = {"num_hidden_layers": 2}
    models = {
        "experts": build_model_folder(tmp_path / "experts", "qwen2_moe", **two_layers),
        "mtp": add_mtp_layers(build_model_folder(tmp_path / "a", "deepseek_v3", **two_layers, num_mtp_layers=1)),
        "dense": build_model_folder(tmp_path / "dense", "qwen3", num_hidden_layers=4),
    }
    shared = {"task": "train", "samples": samples, "micro_batch_size": 2, "steps": 3}
    truths = one_rank.run("ranks.tasks.run_cases", cases=[{"model": model} for model in models.values()], **shared)
    cases = [{"model": models[name], **layout} for name, layout in LAYOUTS.values()]
    runs = two_ranks.run("ranks.tasks.run_cases", cases=cases, **shared)
    for (case, (name, layout)), run in zip(LAYOUTS.items(), runs, strict=True):
        truth = dict(zip(models, truths, strict=True))[name]
        curves = ["loss", "grad_norm", *(["mtp_loss"] if name == "mtp" else [])]
        differences = {curve: max_relative_difference(run[curve], truth[curve]) for curve in curves}
        # 11 and 8 bits of mantissa; a missing or doubled gradient would differ by tenths.
        fp16 = layout["precision"] == "fp16"
        assert differences["loss"] < (0.0005 if fp16 else 0.003), case
        assert differences.get("mtp_loss", 0) < 0.0005, case
        assert differences["grad_norm"] < (0.004 if fp16 else 0.02), case
        if fp16:
            assert set(run["skipped"]) == {0} and set(run["loss_scale"]) == {256}, case
