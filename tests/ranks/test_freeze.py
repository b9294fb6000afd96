"""Frozen tensors do not change, need no memory for training, and leave the gradients of the others as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.test_layouts import TOLERANCE, max_relative_difference
from ranks.tiny import build_model_folder

STEPS, HALF = 6, 3
LOWER_HALF = ["model.embed_tokens.*", "model.layers.0.*"]
"""All of the first of two pipeline stages."""


@pytest.mark.parametrize(
    ("ranks", "family", "freeze", "settings"),
    [
        pytest.param(1, "qwen3", ["model.embed_tokens.*", "*norm*", "*.mlp.*"], {"recompute": "full"}, id="full"),
        pytest.param(
            1, "gpt_oss", ["*.self_attn.*", "*.experts.gate_up*", "lm_head*", "model.embed*"], {}, id="experts"
        ),
        pytest.param(
            1,
            "deepseek_v3",
            ["model.embed*", "*.experts.[024].*", "*a_proj*", "*.gate.*"],
            {"recompute": "selective", "more": {"recompute_modules": ["moe", "core_attn"]}},
            id="some-experts",
        ),
        pytest.param(2, "qwen3", ["*.o_proj.*", "*.mlp.*", "lm_head*"], {"tp": 2, "sp": True}, id="tp2"),
        pytest.param(2, "qwen3", LOWER_HALF, {"pp": 2, "precision": "bf16"}, id="pp2"),
    ],
)
def test_gradients_of_the_other_tensors_are_bitwise_equal(
    ranks: int,
    family: str,
    freeze: list[str],
    settings: dict[str, Any],
    worlds: dict[int, RankPool],
    samples: Path,
    tmp_path: Path,
) -> None:
    model = build_model_folder(tmp_path / family, family, tie_word_embeddings=False, num_hidden_layers=2)
    common: dict[str, Any] = {"model": model, "samples": samples, "micro_batch_size": 4, **settings}
    full = worlds[ranks].run("ranks.freeze_tasks.gradients", **common)
    common["more"] = {**common.get("more", {}), "freeze": freeze}
    partial = worlds[ranks].run("ranks.freeze_tasks.gradients", **common)
    assert 0 < len(partial["hashes"]) < len(full["hashes"])
    assert partial["hashes"].items() <= full["hashes"].items()
    for kind in ("gradients", "optimizer state"):
        assert partial["memory"][kind] < full["memory"][kind]


@pytest.mark.thorough_cases("pp2-fp16")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(2, {"pp": 2, "overlap_grad_reduce": True, "overlap_param_gather": True}, id="pp2-overlap"),
        pytest.param(2, {"pp": 2, "precision": "fp16"}, id="pp2-fp16"),
        pytest.param(2, {"fsdp": True}, id="fsdp"),
    ],
)
def test_training_with_a_frozen_stage(
    ranks: int,
    layout: dict[str, Any],
    worlds: dict[int, RankPool],
    models: dict[str, Path],
    samples: Path,
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {"model": models["qwen2-untied"], "samples": samples, "micro_batch_size": 4}
    settings |= {"more": {"freeze": LOWER_HALF}, "steps": STEPS}
    task = "ranks.tasks.train"
    full = worlds[ranks].run(task, save_at=[HALF], root=tmp_path, **settings, **layout)
    saved = tmp_path / f"iter_{HALF:07d}"
    resumed = worlds[ranks].run(task, resume=saved, **settings, **layout)
    assert resumed["digest"] == full["digest"]
    assert resumed["loss"] == full["loss"][HALF:]
    if "precision" not in layout:
        alone = worlds[1].run(task, resume=saved, **settings)
        assert max_relative_difference(alone["loss"], full["loss"][HALF:]) < TOLERANCE
