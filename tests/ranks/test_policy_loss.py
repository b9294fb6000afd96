"""The policy loss in every layout equals that of one process: losses, gradients and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.test_layouts import TOLERANCE
from ranks.tiny import build_model_folder

TRAIN = "ranks.policy_tasks.train_policy"
LOSSES: dict[str, dict[str, Any]] = {
    "dapo": {"loss": "dapo", "kl_weight": 0.2, "correction": "sequence", "entropy_weight": 0.1},
    "grpo": {"loss": "grpo", "correction": "token", "entropy_weight": 0.1},
    "gspo": {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.05, "kl_weight": 0.2, "correction": "mask"},
}


@pytest.fixture(scope="module")
def run(models: dict[str, Path], samples: Path) -> dict[str, Any]:
    return {"model": models["qwen3-tied"], "samples": samples, "temperature": 0.8, "steps": 4, "has_weights": True}


@pytest.fixture(scope="module")
def alone(one_rank: RankPool, run: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {name: one_rank.run(TRAIN, grpo=grpo, **run) for name, grpo in LOSSES.items()}


def assert_same(result: dict[str, Any], expected: dict[str, Any]) -> None:
    for curve in ("loss", "grad_norm"):
        assert result[curve] == pytest.approx(expected[curve], rel=TOLERANCE, abs=1e-7)
    for metrics, others in zip(result["metrics"], expected["metrics"], strict=True):
        assert metrics == pytest.approx(others, rel=1e-4, abs=1e-6)
    assert [peak[1:] for peak in result["peaks"]] == [peak[1:] for peak in expected["peaks"]]


@pytest.mark.thorough_cases("dapo-cp2", "dapo-dp2", "dapo-pp2", "gspo-tp2-sp", "grpo-cp2-tp2")
@pytest.mark.parametrize(
    ("loss", "ranks", "layout"),
    [
        pytest.param("dapo", 1, {"micro_batch_size": 1, "packing": False}, id="dapo-micro-batch-1-unpacked"),
        pytest.param("dapo", 2, {"tp": 2, "sp": True}, id="dapo-tp2-sp"),
        pytest.param("dapo", 2, {"cp": 2}, id="dapo-cp2"),
        pytest.param("dapo", 2, {}, id="dapo-dp2"),
        pytest.param("dapo", 2, {"pp": 2}, id="dapo-pp2"),
        pytest.param("grpo", 2, {}, id="grpo-dp2"),
        pytest.param("grpo", 4, {"cp": 2, "tp": 2}, id="grpo-cp2-tp2"),
        pytest.param("gspo", 2, {"cp": 2}, id="gspo-cp2"),
        pytest.param("gspo", 2, {"pp": 2}, id="gspo-pp2"),
        pytest.param("gspo", 2, {"tp": 2, "sp": True}, id="gspo-tp2-sp"),
    ],
)
def test_layout_equals_a_single_process(
    loss: str,
    ranks: int,
    layout: dict[str, Any],
    worlds: dict[int, RankPool],
    run: dict[str, Any],
    alone: dict[str, Any],
) -> None:
    assert_same(worlds[ranks].run(TRAIN, grpo=LOSSES[loss], **run | layout), alone[loss])


def test_experts(one_rank: RankPool, two_ranks: RankPool, run: dict[str, Any], tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "model", "qwen2_moe", num_hidden_layers=2)
    case = run | {"model": model, "grpo": LOSSES["dapo"]}
    assert_same(two_ranks.run(TRAIN, ep=2, **case), one_rank.run(TRAIN, **case))


@pytest.mark.parametrize("loss", ["dapo", "gspo"])
def test_a_step_without_gradient_is_no_divergence(loss: str, one_rank: RankPool, run: dict[str, Any]) -> None:
    result = one_rank.run(TRAIN, grpo={"loss": loss}, all_clipped=True, **run | {"has_weights": False, "steps": 1})
    assert result["loss"][0] > 0.5 and result["grad_norm"] == [0.0]
    assert result["metrics"][0]["clip_ratio/low_mean"] == 1
