"""DPO in every layout equals DPO in one process, and resumed runs are bitwise identical."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ranks.rank_pool import RankPool
from ranks.test_layouts import TOLERANCE, assert_same, max_relative_difference
from ranks.tiny import build_model_folder, build_pairs

TRAIN = "ranks.tasks.train"
SHARED = {"micro_batch_size": 4, "global_batch_size": 8, "steps": 4, "evaluate": True}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_pairs(tmp_path_factory.mktemp("pairs") / "store")


@pytest.fixture(scope="module")
def run(models: dict[str, Path], pairs: Path) -> dict[str, Any]:
    dpo = {"beta": 0.3, "sft_weight": 0.1}
    return {"model": models["qwen3-tied"], "samples": pairs, "dpo": dpo, **SHARED}


@pytest.fixture(scope="module")
def alone(one_rank: RankPool, run: dict[str, Any]) -> dict[str, Any]:
    return dict(one_rank.run(TRAIN, **run))


def metric(result: dict[str, Any], name: str) -> list[float]:
    return [step[name] for step in result["metrics"]]


@pytest.mark.thorough_cases("micro-batch-4-unpacked", "cp2", "fsdp2", "pp2-vpp2-dp2", "pp2", "tp2-sp")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, {"micro_batch_size": 2}, id="micro-batch-2"),
        pytest.param(1, {"packing": False}, id="micro-batch-4-unpacked"),
        pytest.param(2, {"tp": 2, "sp": True}, id="tp2-sp"),
        pytest.param(2, {"pp": 2}, id="pp2"),
        pytest.param(2, {"micro_batch_size": 2}, id="dp2"),
        pytest.param(2, {"fsdp": True}, id="fsdp2"),
        pytest.param(2, {"cp": 2}, id="cp2"),
        pytest.param(4, {"pp": 2, "vpp": 2}, id="pp2-vpp2-dp2"),
    ],
)
def test_layout_trains_as_single_process(
    ranks: int,
    layout: dict[str, Any],
    worlds: dict[int, RankPool],
    models: dict[str, Path],
    run: dict[str, Any],
    alone: dict[str, Any],
) -> None:
    if "vpp" in layout:
        run = run | {"model": models["four-layers"]}
        alone = worlds[1].run(TRAIN, **run)
    result = worlds[ranks].run(TRAIN, **run | layout)
    assert_same(result, alone)
    assert max_relative_difference(metric(result, "logps/rejected"), metric(alone, "logps/rejected")) < TOLERANCE
    # Rewards are small differences of large numbers: compare with an absolute tolerance.
    margins = np.array([metric(item, "rewards/margins") for item in (result, alone)])
    assert np.abs(margins[0] - margins[1]).max() < 1e-4 * np.abs(margins).max()


def test_dpo_increases_the_margin(alone: dict[str, Any]) -> None:
    assert metric(alone, "rewards/margins")[-1] > 0.1
    assert alone["valid_after"] < alone["valid_before"] - 0.05


def test_dpo_moe_aux_loss_equals_single_process(
    one_rank: RankPool, two_ranks: RankPool, pairs: Path, tmp_path: Path
) -> None:
    model = build_model_folder(tmp_path / "model", "qwen3_moe", num_hidden_layers=2)
    run = {"model": model, "samples": pairs, "dpo": {"loss": "ipo"}, "steps": 3, "evaluate": True}
    run["moe"] = {"seq_aux_loss": 0.1}
    truth = one_rank.run(TRAIN, **run)
    result = two_ranks.run(TRAIN, ep=2, micro_batch_size=2, **run)
    assert_same(result, truth)
    # Normalized by loss tokens, or here by pairs: a uniform load gives 1.
    assert 0.9 < truth["load"][0]["seq_aux_loss"] < 2
    assert result["load"][0]["seq_aux_loss"] == pytest.approx(truth["load"][0]["seq_aux_loss"], rel=TOLERANCE)


@pytest.mark.thorough_cases("fp16")
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_dpo_resumes_bitwise_and_in_another_layout(
    precision: str, one_rank: RankPool, two_ranks: RankPool, run: dict[str, Any], tmp_path: Path
) -> None:
    """The reference of the first start is used again; it differs from the policy at the checkpoint."""
    run = run | {"precision": precision, "reference": tmp_path, "evaluate": False}
    uninterrupted = one_rank.run(TRAIN, **run, save_at=[2], root=tmp_path)
    resume = {"resume": tmp_path / "iter_0000002", "fresh": False}
    before = (tmp_path / "reference.npz").read_bytes()
    resumed = one_rank.run(TRAIN, **run, **resume)
    assert resumed["digest"] == uninterrupted["digest"]
    assert resumed["loss"] == uninterrupted["loss"][2:]
    elsewhere = two_ranks.run(TRAIN, tp=2, **run, **resume)
    assert max_relative_difference(elsewhere["loss"], uninterrupted["loss"][2:]) < 0.02
    assert (tmp_path / "reference.npz").read_bytes() == before
