"""Precisions follow float32 where they meet experts, MTP layers, shared lines and virtual stages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ranks.rank_pool import RankPool
from ranks.test_layouts import furthest
from ranks.tiny import add_mtp_layers, build_model_folder

FP16 = {"precision": "fp16", "more": {"initial_loss_scale": 256.0}}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "experts over ranks": ("experts", {**FP16, "ep": 2}),
    "MTP layers on their stage": ("mtp", {**FP16, "pp": 2}),
    "shared lines": ("dense", {**FP16, "cp": 2}),
    "virtual stages": ("dense", {"precision": "bf16", "pp": 2, "vpp": 2}),
}


def test_precision_follows_fp32(one: RankPool, two: RankPool, samples: Path, tmp_path: Path) -> None:
    two_layers: dict[str, Any] = {"num_hidden_layers": 2}
    models = {
        "experts": build_model_folder(tmp_path / "experts", "qwen2_moe", **two_layers),
        "mtp": add_mtp_layers(build_model_folder(tmp_path / "a", "deepseek_v3", **two_layers, num_mtp_layers=1)),
        "dense": build_model_folder(tmp_path / "dense", "qwen3", num_hidden_layers=4),
    }
    shared = {"task": "train", "samples": samples, "micro_batch_size": 2, "steps": 3}
    truths = one.run("ranks.tasks.each", cases=[{"model": model} for model in models.values()], **shared)
    cases = [{"model": models[name], **layout} for name, layout in LAYOUTS.values()]
    runs = two.run("ranks.tasks.each", cases=cases, **shared)
    for (what, (name, layout)), run in zip(LAYOUTS.items(), runs, strict=True):
        truth = dict(zip(models, truths, strict=True))[name]
        curves = ["loss", "grad_norm", *(["mtp_loss"] if name == "mtp" else [])]
        apart = {curve: furthest(run[curve], truth[curve]) for curve in curves}
        print(what, apart)
        # Mantissas of 11 and of 8 bits; a gradient lost or counted twice differs by tenths.
        half = layout["precision"] == "fp16"
        assert apart["loss"] < (0.0005 if half else 0.003) and apart.get("mtp_loss", 0) < 0.0005
        assert apart["grad_norm"] < (0.004 if half else 0.02)
        assert not half or (set(run["skipped"]) == {0} and set(run["loss_scale"]) == {256})
