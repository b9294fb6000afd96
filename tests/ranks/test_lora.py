"""Adapters in every parallel layout: trained like in one process, saved and resumed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.test_layouts import CURVES, TOLERANCE, max_relative_difference
from ranks.tiny import build_model_folder, build_pairs

STEPS = 4
LORA: dict[str, Any] = {"rank": 4, "alpha": 16, "dropout": 0.1}
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]
SETTINGS: dict[str, Any] = {
    "qwen3": {"lora": LORA},
    "latent": {"lora": LORA | {"targets": LATENT, "dora": True, "dropout": 0.0}},
    "shared-heads": {"lora": LORA | {"targets": ["k_proj", "v_proj", "down_proj"]}},
}
"""By model; one of them has adapters of DoRA, one has adapters of some of the linear layers only."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root, sizes = tmp_path_factory.mktemp("models"), {"num_hidden_layers": 2}
    return {
        "qwen3": build_model_folder(root / "qwen3", "qwen3", tie_word_embeddings=False, **sizes),
        "shared-heads": build_model_folder(root / "shared-heads", "llama", num_key_value_heads=1, **sizes),
        "latent": build_model_folder(root / "latent", "deepseek_v3", first_k_dense_replace=2, **sizes),
    }


@pytest.fixture(scope="module")
def alone(one_rank: RankPool, folders: dict[str, Path], samples: Path) -> dict[str, dict[str, Any]]:
    """Runs of one process, by model."""
    return {
        name: one_rank.run(
            "ranks.tasks.train", model=folder, samples=samples, steps=STEPS, micro_batch_size=2, **SETTINGS[name]
        )
        for name, folder in folders.items()
    }


def assert_same(run: dict[str, Any], truth: dict[str, Any], first: int = 0) -> None:
    """The curves of a run that begins at step ``first``."""
    differences = {curve: max_relative_difference(run[curve], truth[curve][first:]) for curve in CURVES}
    assert max(differences.values()) < TOLERANCE


LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tp": 2, "sp": False},
    "tp2-sp-recomputed": {"tp": 2, "sp": True, "recompute": "full"},
    "pp2-recomputed": {"pp": 2, "recompute": "selective", "more": {"recompute_modules": ["mlp", "core_attn"]}},
    "pp2": {"pp": 2},  # dropout of a micro batch runs again after the forward pass of the next one
    "dp2": {},
    "cp2": {"cp": 2, "recompute": "selective"},
}


CASES = [
    *(("qwen3", layout) for layout in ("tp2-sp-recomputed", "pp2-recomputed", "pp2", "dp2")),
    *(("latent", layout) for layout in ("tp2", "tp2-sp-recomputed", "cp2")),
    ("shared-heads", "tp2"),
]


@pytest.mark.thorough_cases("latent-cp2", "latent-tp2", "qwen3-pp2", "qwen3-dp2", "qwen3-tp2-sp-recomputed")
@pytest.mark.parametrize(("model", "layout"), CASES)
def test_layouts_train_as_one_process(
    model: str, layout: str, two_ranks: RankPool, folders: dict[str, Path], samples: Path, alone: dict[str, Any]
) -> None:
    settings = {"model": folders[model], "samples": samples, "steps": STEPS, "micro_batch_size": 2}
    run = two_ranks.run("ranks.tasks.train", **settings, **SETTINGS[model], **LAYOUTS[layout])
    assert_same(run, alone[model])


def test_resumed_runs_are_bitwise_identical_and_continue_in_other_layouts(
    one_rank: RankPool, two_ranks: RankPool, folders: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    """With DoRA, and with an embedding that is trained whole."""
    settings = {"model": folders["qwen3"], "samples": samples, "steps": STEPS, "micro_batch_size": 2}
    settings["lora"] = LORA | {"dora": True, "dropout": 0.0, "modules_to_save": ["embed_tokens"]}
    full = two_ranks.run("ranks.tasks.train", tp=2, save_at=[2], root=tmp_path, **settings)
    rest = two_ranks.run("ranks.tasks.train", tp=2, resume=tmp_path / "iter_0000002", **settings)
    for curve in CURVES:
        assert rest[curve] == full[curve][2:]
    assert rest["digest"] == full["digest"]
    alone = one_rank.run("ranks.tasks.train", resume=tmp_path / "iter_0000002", **settings)
    assert_same(alone, {curve: full[curve][2:] for curve in CURVES})


def test_reference_of_dpo_is_the_starting_model(one_rank: RankPool, folders: dict[str, Path], tmp_path: Path) -> None:
    """Also with an adapter that is trained further: as in TRL, the reference has it."""
    settings: dict[str, Any] = {"model": folders["qwen3"], "samples": build_pairs(tmp_path / "pairs"), "dpo": {}}
    settings |= {"global_batch_size": 8, "micro_batch_size": 4}
    first = one_rank.run("ranks.tasks.train", lora={"rank": 4}, steps=3, exports=tmp_path, **settings)
    again = one_rank.run("ranks.tasks.train", lora={"path": str(tmp_path / "adapter")}, steps=3, **settings)
    for run in (first, again):
        assert run["loss"][0] == pytest.approx(math.log(2), abs=1e-6) and abs(run["loss"][2] - run["loss"][0]) > 1e-4
    logps = [run["metrics"][0]["logps/chosen"] for run in (first, again)]
    assert abs(logps[0] - logps[1]) > 1e-3
