"""KTO in every layout equals KTO in one process, and resumed runs are bitwise identical."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.test_layouts import TOLERANCE, assert_same, max_relative_difference
from ranks.tiny import build_answers, build_model_folder

TRAIN = "ranks.tasks.train"
SHARED = {"micro_batch_size": 4, "global_batch_size": 8, "steps": 4, "evaluate": True}


@pytest.fixture(scope="module")
def run(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    samples = build_answers(tmp_path_factory.mktemp("answers") / "store")
    kto = {"beta": 0.3, "desirable_weight": 1.5, "undesirable_weight": 0.5}
    return {"model": models["qwen3-tied"], "samples": samples, "kto": kto, **SHARED}


@pytest.fixture(scope="module")
def alone(one_rank: RankPool, run: dict[str, Any]) -> dict[str, Any]:
    return dict(one_rank.run(TRAIN, **run))


def divergences(result: dict[str, Any]) -> list[float]:
    return [step["kl"] for step in result["metrics"]]


@pytest.mark.thorough_cases("cp2", "fsdp2", "pp2-vpp2-dp2")
@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        pytest.param(1, {"micro_batch_size": 2, "packing": False}, id="micro-batch-2-unpacked"),
        pytest.param(2, {"tp": 2, "sp": True}, id="tp2-sp"),
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
    # A divergence is a small difference of large numbers.
    assert divergences(result) == pytest.approx(divergences(alone), rel=TOLERANCE, abs=1e-5)


@pytest.mark.thorough_cases("lora")
@pytest.mark.parametrize("lora", [{}, {"rank": 4}], ids=["whole", "lora"])
def test_experts(
    lora: dict[str, int], one_rank: RankPool, two_ranks: RankPool, run: dict[str, Any], tmp_path: Path
) -> None:
    model = build_model_folder(tmp_path / "model", "qwen2_moe", num_hidden_layers=2)
    case = run | {"model": model, "lora": lora, "steps": 2}
    alone = one_rank.run(TRAIN, **case)
    assert_same(two_ranks.run(TRAIN, **case, ep=2), alone)
    assert alone["loss"][0] == pytest.approx(0.5, abs=1e-6) and abs(alone["loss"][1] - alone["loss"][0]) > 1e-5


def test_divergence_grows_and_resumes_bitwise(one_rank: RankPool, run: dict[str, Any], tmp_path: Path) -> None:
    run = run | {"reference": tmp_path, "evaluate": False}
    uninterrupted = one_rank.run(TRAIN, **run, save_at=[2], root=tmp_path)
    assert divergences(uninterrupted)[0] == pytest.approx(0, abs=1e-5) and divergences(uninterrupted)[-1] > 0.01
    resumed = one_rank.run(TRAIN, **run, resume=tmp_path / "iter_0000002", fresh=False)
    assert resumed["digest"] == uninterrupted["digest"]
    assert resumed["loss"] == uninterrupted["loss"][2:] and divergences(resumed) == divergences(uninterrupted)[2:]


def test_kl_changes_the_loss(one_rank: RankPool, run: dict[str, Any], alone: dict[str, Any]) -> None:
    without = one_rank.run(TRAIN, **run | {"kto": run["kto"] | {"loss": "apo_zero_unpaired"}})
    assert "kl" not in without["metrics"][0]
    assert max_relative_difference(without["loss"][:1], alone["loss"][:1]) < 1e-4
    assert max_relative_difference(without["loss"][-1:], alone["loss"][-1:]) > 1e-3
