"""Converted checkpoints load in every parallel layout, and checkpoints of runs convert in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from isthmus.convert.legacy.legacy_layout import LegacyLayout
from isthmus.convert.transfer import convert
from isthmus.convert.verify.compare import compare_models
from ranks.rank_pool import RankPool
from ranks.tiny import ARCHETYPES, build_model_folder

pytestmark = pytest.mark.ranks


LAYOUTS = pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, {}, id="one"),
        pytest.param(4, {"tp": 2, "pp": 2}, id="tp2-pp2"),
        pytest.param(4, {"tp": 4}, id="tp4"),
    ],
)
TIED = pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])


@pytest.mark.thorough_cases("untied-tp4", "tied-tp2-pp2")
@LAYOUTS
@TIED
def test_one_checkpoint_loads_in_every_layout(
    ranks: int, layout: dict[str, Any], tied: bool, worlds: dict[int, RankPool], tmp_path: Path
) -> None:
    model = build_model_folder(tmp_path / "hf", "qwen3", tie_word_embeddings=tied)
    convert(model, tmp_path / "megatron")
    results = worlds[ranks].run(
        "ranks.tasks.load_strictly", model=model, checkpoint_folder=tmp_path / "megatron" / "release", **layout
    )
    assert results["max_difference"] == 0
    assert results["tensors"] >= 4 * 8


@pytest.mark.parametrize(
    ("family", "ranks", "layout"),
    [
        pytest.param("llama", 1, {}, id="llama"),
        pytest.param("qwen3", 4, {"tp": 2, "pp": 2}, id="qwen3-tp2-pp2"),
        pytest.param("gpt2", 2, {"tp": 2}, id="gpt2-tp2"),
        pytest.param("mixtral", 1, {}, id="mixtral"),
        pytest.param("qwen2_moe", 2, {"pp": 2}, id="qwen2_moe-pp2"),
    ],
)
def test_megatron_core_layers_load_it(
    family: str, ranks: int, layout: dict[str, Any], worlds: dict[int, RankPool], tmp_path: Path
) -> None:
    model = build_model_folder(tmp_path / "hf", family)
    convert(model, tmp_path / "megatron")
    # The norm before experts has two names in the checkpoint, one per kind of layer; a model loads one of them.
    strict = "raise_unexpected" if "mixtral" in family or "moe" in family else "raise_all"
    results = worlds[ranks].run(
        "ranks.megatron_core_model.load_into_megatron_model",
        model=model,
        checkpoint_folder=tmp_path / "megatron" / "release",
        strict=strict,
        **layout,
    )
    assert results["max_difference"] == 0
    assert results["tensors"] >= 4 * 6


@pytest.mark.thorough_cases("untied-tp4", "tied-tp2-pp2")
@LAYOUTS
@TIED
def test_legacy_checkpoint_loads_strictly(
    ranks: int, layout: dict[str, Any], tied: bool, worlds: dict[int, RankPool], tmp_path: Path
) -> None:
    model = build_model_folder(tmp_path / "hf", "qwen3", tie_word_embeddings=tied)
    convert(model, tmp_path / "megatron", "torch", spelling="local", layout=LegacyLayout(**layout))
    folder = tmp_path / "megatron" / "release"
    results = worlds[ranks].run("ranks.tasks.load_legacy", model=model, checkpoint_folder=folder, **layout)
    assert results == {"max_difference": 0, "tp": layout.get("tp", 1)}


@pytest.mark.parametrize("family", ARCHETYPES)
def test_archetypes_load(family: str, one_rank: RankPool, tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "hf", family, tie_word_embeddings=False)
    convert(model, tmp_path / "megatron")
    folder = tmp_path / "megatron" / "release"
    assert one_rank.run("ranks.tasks.load_strictly", model=model, checkpoint_folder=folder)["max_difference"] == 0


@pytest.mark.thorough_cases("fsdp2", "dp2")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, {"precision": "bf16"}, id="bf16"),
        pytest.param(2, {"tp": 2}, id="tp2"),
        pytest.param(2, {"pp": 2}, id="pp2"),
        pytest.param(2, {}, id="dp2"),
        pytest.param(2, {"fsdp": True}, id="fsdp2"),
    ],
)
def test_converted_run_checkpoint_equals_export(
    ranks: int,
    layout: dict[str, Any],
    worlds: dict[int, RankPool],
    models: dict[str, Path],
    samples: Path,
    tmp_path: Path,
) -> None:
    model = models["qwen3-tied"]
    worlds[ranks].run(
        "ranks.tasks.save_and_export",
        model=model,
        samples=samples,
        root=tmp_path / "checkpoints",
        destination=tmp_path / "export",
        **layout,
    )
    convert(tmp_path / "checkpoints", tmp_path / "converted", hf_like=model)
    if (
        layout.get("precision") != "bf16"
    ):  # the export has the dtype of the model folder, the checkpoint that of the run
        compare_models(tmp_path / "export", tmp_path / "converted")
        compare_models(tmp_path / "export", tmp_path / "checkpoints", hf_like=model)
    else:
        convert(tmp_path / "export", tmp_path / "export-bf16", "hf", dtype=torch.bfloat16)
        compare_models(tmp_path / "export-bf16", tmp_path / "converted")
