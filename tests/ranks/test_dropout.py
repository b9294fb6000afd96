"""Dropout and noise are the same in every layout, in recomputed and in resumed steps, and not in evaluations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.test_layouts import CURVES, TOLERANCE, max_relative_difference
from ranks.tiny import build_model_folder, build_pairs

TRAIN = "ranks.tasks.train"
RATES = {"attn_pdrop": 0.3, "resid_pdrop": 0.1, "embd_pdrop": 0.1}
NOISE = {"neftune_alpha": 3.0}


@pytest.fixture(scope="module")
def run(samples: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Arguments of a run of a GPT-2 with dropout in all places and noise on the embeddings."""
    model = build_model_folder(tmp_path_factory.mktemp("model") / "gpt2", "gpt2", **RATES)
    sizes = {"micro_batch_size": 4, "global_batch_size": 8}
    return {"model": model, "samples": samples, "steps": 4, "more": NOISE, **sizes}


@pytest.fixture(scope="module")
def alone(one_rank: RankPool, run: dict[str, Any]) -> dict[str, Any]:
    return dict(one_rank.run(TRAIN, **run, evaluate=True))


@pytest.mark.thorough_cases("one-micro-batch", "cp2-recomputed", "tp2", "fsdp2", "dp2", "tp2-pp2-recomputed")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, {"micro_batch_size": 8}, id="one-micro-batch"),
        pytest.param(2, {"tp": 2, "sp": False}, id="tp2"),
        pytest.param(2, {"tp": 2, "sp": True, "recompute": "full"}, id="tp2-sp-recomputed"),
        pytest.param(2, {"cp": 2, "recompute": "selective"}, id="cp2-recomputed"),
        pytest.param(2, {"micro_batch_size": 2}, id="dp2"),
        pytest.param(2, {"fsdp": True}, id="fsdp2"),
        pytest.param(4, {"pp": 2, "vpp": 2}, id="pp2-vpp2-dp2"),
        pytest.param(4, {"tp": 2, "pp": 2, "recompute": "full"}, id="tp2-pp2-recomputed"),
    ],
)
def test_layout_has_the_masks_of_a_single_process(
    ranks: int, layout: dict[str, Any], worlds: dict[int, RankPool], run: dict[str, Any], alone: dict[str, Any]
) -> None:
    results = worlds[ranks].run(TRAIN, **run | layout)
    differences = {curve: max_relative_difference(results[curve], alone[curve]) for curve in CURVES}
    assert max(differences.values()) < TOLERANCE


def test_dropout_changes_training_and_no_evaluation(
    one_rank: RankPool, run: dict[str, Any], alone: dict[str, Any]
) -> None:
    without = one_rank.run(
        TRAIN, **run | {"more": NOISE | {"attention_dropout": 0.0, "hidden_dropout": 0.0}}, evaluate=True
    )
    assert without["valid_before"] == alone["valid_before"]
    assert max_relative_difference(without["loss"], alone["loss"]) > 1e-3
    other = one_rank.run(
        TRAIN, **run | {"steps": 1, "more": NOISE | {"seed": 1}}
    )  # the weights are those of the folder
    assert max_relative_difference(other["loss"], alone["loss"][:1]) > 1e-4
    for place in ("attention_dropout", "hidden_dropout", "neftune_alpha"):
        one_kind = one_rank.run(TRAIN, **run | {"steps": 1, "more": NOISE | {place: 0.0}})["loss"]
        assert (
            min(max_relative_difference(one_kind, other[:1]) for other in (alone["loss"], without["loss"]))
            > 10 * TOLERANCE
        )


@pytest.mark.thorough_cases("tp2")
@pytest.mark.parametrize("layout", [{"tp": 2, "precision": "bf16"}, {"precision": "bf16"}], ids=["tp2", "dp2"])
def test_recomputed_and_resumed_runs_are_bitwise_identical(
    layout: dict[str, Any], two_ranks: RankPool, run: dict[str, Any], tmp_path: Path
) -> None:
    full = two_ranks.run(TRAIN, **run | layout, save_at=[2], root=tmp_path)
    rest = two_ranks.run(TRAIN, **run | layout, resume=tmp_path / "iter_0000002", recompute="full")
    assert rest["first"] == 2 and rest["digest"] == full["digest"]
    for curve in CURVES:
        assert rest[curve] == full[curve][2:]


def test_sinks_windows_and_experts_with_dropout(
    one_rank: RankPool, two_ranks: RankPool, samples: Path, tmp_path: Path
) -> None:
    """Rates of the settings, for a family whose config has only one."""
    model = build_model_folder(tmp_path / "model", "gpt_oss", num_hidden_layers=2)
    run = {"model": model, "samples": samples, "steps": 3, "micro_batch_size": 2}
    more = {"more": {"attention_dropout": 0.2, "hidden_dropout": 0.1}}
    results = [pool.run(TRAIN, **run, **more, **layout) for pool, layout in ((one_rank, {}), (two_ranks, {"tp": 2}))]
    assert max(max_relative_difference(results[1][curve], results[0][curve]) for curve in CURVES) < TOLERANCE
    assert max_relative_difference(results[0]["loss"], one_rank.run(TRAIN, **run)["loss"]) > 1e-3


def test_drawn_experts_are_the_same_in_every_layout(
    one_rank: RankPool, two_ranks: RankPool, samples: Path, tmp_path: Path
) -> None:
    model = build_model_folder(tmp_path / "model", "phimoe", num_hidden_layers=2, input_jitter_noise=0.0)
    run = {"model": model, "samples": samples, "steps": 3, "micro_batch_size": 2}
    alone = one_rank.run(TRAIN, **run)
    for layout in ({"ep": 2, "recompute": "full"}, {"tp": 2, "sp": True}):
        results = two_ranks.run(TRAIN, **run, **layout)
        assert max(max_relative_difference(results[curve], alone[curve]) for curve in CURVES) < TOLERANCE
    other = one_rank.run(TRAIN, **run | {"steps": 1, "more": {"seed": 1}})
    assert max_relative_difference(other["loss"], alone["loss"][:1]) > 1e-4


def test_reference_of_dpo_has_no_dropout(one_rank: RankPool, run: dict[str, Any], tmp_path: Path) -> None:
    pairs = build_pairs(tmp_path / "pairs")
    results = one_rank.run(TRAIN, **run | {"samples": pairs, "steps": 1, "dpo": {"beta": 0.3}}, evaluate=True)
    assert results["valid_before"] == pytest.approx(math.log(2), abs=1e-6)  # the policy equals the reference
    assert abs(results["loss"][0] - math.log(2)) > 1e-3
