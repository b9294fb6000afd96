"""Expert parallelism equals one process: losses, norms, checkpoints, exports and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ranks.rank_pool import RankPool
from ranks.test_layouts import CURVES, TOLERANCE, max_relative_difference
from ranks.tiny import build_model_folder

STEPS = 4
BALANCED = {"aux_loss": 0.1, "seq_aux_loss": 0.05, "z_loss": 0.01}
FAMILIES: dict[str, dict[str, Any]] = {
    # Shared experts, a dense first layer, a router bias.
    "deepseek_v3": {"num_hidden_layers": 2},
    # Expert biases, clamped activations.
    "gpt_oss": {"num_hidden_layers": 2},
    # A bias of the sum of the experts' outputs.
    "isthmus": {"num_hidden_layers": 2, "mlp_only_layers": []},
}
MOE: dict[str, dict[str, Any]] = {
    "deepseek_v3": BALANCED | {"expert_bias_update_rate": 0.02},
    "gpt_oss": BALANCED,
    "isthmus": BALANCED,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("moe")
    return {family: build_model_folder(root / family, family, **settings) for family, settings in FAMILIES.items()}


@pytest.fixture(scope="module")
def alone(
    one_rank: RankPool, folders: dict[str, Path], samples: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, Any], Path]]:
    """Result of one process, and its checkpoint at step 2."""
    values = {}
    for family, model in folders.items():
        root = tmp_path_factory.mktemp("checkpoints")
        run = one_rank.run("ranks.tasks.train", **settings(family, model, samples), save_at=[2], root=root)
        values[family] = run, root / "iter_0000002"
    return values


def settings(family: str, model: Path, samples: Path) -> dict[str, Any]:
    sizes = {"micro_batch_size": 2, "global_batch_size": 8}
    return {"model": model, "samples": samples, "steps": STEPS, "moe": MOE[family], **sizes}


def assert_same(run: dict[str, Any], truth: dict[str, Any], first: int = 0) -> None:
    differences = {curve: max_relative_difference(run[curve], truth[curve][first:]) for curve in CURVES}
    assert max(differences.values()) < TOLERANCE
    for mine, theirs in zip(run["load"], truth["load"][first:], strict=True):
        assert mine == pytest.approx(theirs, rel=TOLERANCE)


@pytest.mark.thorough_cases("tp2-etp1", "tp2-ep2-etp2")
@pytest.mark.parametrize(
    ("family", "ranks", "layout"),
    [
        pytest.param("deepseek_v3", 2, {"ep": 2}, id="ep2"),
        pytest.param("deepseek_v3", 2, {"tp": 2, "etp": 1, "ep": 2}, id="tp2-ep2-etp1"),
        pytest.param("gpt_oss", 2, {"tp": 2, "etp": 1}, id="tp2-etp1"),
        pytest.param("gpt_oss", 2, {"etp": 2}, id="etp2"),
        pytest.param("gpt_oss", 4, {"tp": 2, "ep": 2}, id="tp2-ep2-etp2"),
        pytest.param("isthmus", 2, {"tp": 2, "ep": 2, "etp": 1}, id="output-bias-tp2-ep2"),
        pytest.param("deepseek_v3", 4, {"pp": 2, "ep": 2, "recompute": "full"}, id="pp2-ep2-recompute"),
    ],
)
def test_expert_parallel_trains_as_single_process(
    family: str,
    ranks: int,
    layout: dict[str, Any],
    worlds: dict[int, RankPool],
    folders: dict[str, Path],
    samples: Path,
    alone: dict[str, tuple[dict[str, Any], Path]],
) -> None:
    run = worlds[ranks].run("ranks.tasks.train", **settings(family, folders[family], samples), **layout)
    assert_same(run, alone[family][0])


@pytest.mark.thorough_cases("4-layout1")
@pytest.mark.parametrize(("ranks", "layout"), [(2, {"ep": 2}), (4, {"tp": 2, "ep": 2})])
def test_all_gather_dispatch_equals_all_to_all(
    ranks: int,
    layout: dict[str, Any],
    worlds: dict[int, RankPool],
    folders: dict[str, Path],
    samples: Path,
    alone: dict[str, tuple[dict[str, Any], Path]],
) -> None:
    run_settings = settings("gpt_oss", folders["gpt_oss"], samples) | {
        "moe": MOE["gpt_oss"] | {"dispatcher": "allgather"}
    }
    assert_same(worlds[ranks].run("ranks.tasks.train", **run_settings, **layout), alone["gpt_oss"][0])


@pytest.mark.parametrize("layout", [{"ep": 2}, {"tp": 2, "etp": 1, "ep": 2}], ids=["ep2", "tp2-ep2-etp1"])
def test_weights_of_tokens_have_no_exchange_of_their_own(
    layout: dict[str, Any], two_ranks: RankPool, folders: dict[str, Path], samples: Path
) -> None:
    """An all-to-all to the experts and one back, in both passes of a layer with experts and a micro batch."""
    run = {"model": folders["gpt_oss"], "samples": samples, "micro_batch_size": 2, "global_batch_size": 4}
    calls = two_ranks.run("ranks.data_parallel_tasks.collectives", **run, **layout)
    layers, micro_batches = FAMILIES["gpt_oss"]["num_hidden_layers"], 2 // (2 // layout.get("tp", 1))
    assert sum(name == "alltoall_base_" for name, _ in calls) == 4 * layers * micro_batches


def test_moe_metrics(alone: dict[str, tuple[dict[str, Any], Path]]) -> None:
    run, _ = alone["deepseek_v3"]
    for load in run["load"]:
        assert load.keys() == {"load_max_over_mean", "aux_loss", "seq_aux_loss", "z_loss"}
        assert 1 < load["load_max_over_mean"] < 6
        assert 1 < load["aux_loss"] < load["seq_aux_loss"]
    assert len({load["z_loss"] for load in run["load"]}) == STEPS


def test_sequence_aux_loss_does_not_depend_on_micro_batch(
    one_rank: RankPool, folders: dict[str, Path], samples: Path
) -> None:
    run_settings = settings("gpt_oss", folders["gpt_oss"], samples) | {
        "moe": {"seq_aux_loss": 0.5, "z_loss": 0.1},
        "steps": 3,
    }
    runs = [one_rank.run("ranks.tasks.train", **run_settings | {"micro_batch_size": size}) for size in (1, 4)]
    assert_same(*runs)


@pytest.mark.thorough_cases("one-to-ep2")
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        pytest.param((1, {}), (2, {"ep": 2}), id="one-to-ep2"),
        pytest.param((2, {"ep": 2}), (1, {}), id="ep2-to-one"),
        # The first stage has no experts, and so no optimizer for them.
        pytest.param((4, {"pp": 2, "ep": 2}), (2, {"tp": 2, "etp": 1}), id="pp2-ep2-to-tp2-etp1"),
    ],
)
def test_resume_with_another_ep(
    writer: tuple[int, dict[str, Any]],
    reader: tuple[int, dict[str, Any]],
    worlds: dict[int, RankPool],
    folders: dict[str, Path],
    samples: Path,
    alone: dict[str, tuple[dict[str, Any], Path]],
    tmp_path: Path,
) -> None:
    run_settings = settings("deepseek_v3", folders["deepseek_v3"], samples)
    truth, saved = alone["deepseek_v3"]
    if writer[1]:
        saved = tmp_path / "iter_0000002"
        worlds[writer[0]].run(
            "ranks.tasks.train", **run_settings | {"steps": 2}, save_at=[2], root=tmp_path, **writer[1]
        )
    run = worlds[reader[0]].run("ranks.tasks.train", **run_settings, resume=saved, **reader[1])
    assert run["first"] == 2
    assert_same(run, truth, 2)


def test_resume_with_same_ep_is_bitwise_identical(
    two_ranks: RankPool, folders: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    run_settings = settings("deepseek_v3", folders["deepseek_v3"], samples) | {"ep": 2}
    full = two_ranks.run("ranks.tasks.train", **run_settings, save_at=[2], root=tmp_path)
    rest = two_ranks.run("ranks.tasks.train", **run_settings, resume=tmp_path / "iter_0000002")
    assert rest["digest"] == full["digest"]
    assert rest["loss"] == full["loss"][2:]


@pytest.mark.parametrize(
    ("family", "ranks", "layout"),
    [("deepseek_v3", 2, {"ep": 2}), ("gpt_oss", 4, {"tp": 2, "ep": 2, "etp": 1}), ("gpt_oss", 2, {"etp": 2})],
)
def test_export_has_every_expert_once(
    family: str,
    ranks: int,
    layout: dict[str, Any],
    worlds: dict[int, RankPool],
    folders: dict[str, Path],
    tmp_path: Path,
) -> None:
    """No rank has all experts; a missing write would leave zeros."""
    worlds[ranks].run("ranks.tasks.export", model=folders[family], destination=tmp_path / "hf", **layout)
    got, expected = load_file(tmp_path / "hf/model.safetensors"), load_file(folders[family] / "model.safetensors")
    assert got.keys() == expected.keys()
    assert all((got[name] == expected[name]).all() for name in expected)


def test_expert_capacity_drops_tokens(
    one_rank: RankPool,
    two_ranks: RankPool,
    folders: dict[str, Path],
    samples: Path,
    alone: dict[str, tuple[dict[str, Any], Path]],
) -> None:
    """The capacity is per rank, so both dispatchers give the same result."""
    run_settings = settings("gpt_oss", folders["gpt_oss"], samples)
    tight = [
        two_ranks.run("ranks.tasks.train", **run_settings | {"moe": {"capacity_factor": 1.0, "dispatcher": kind}}, ep=2)
        for kind in ("alltoall", "allgather")
    ]
    assert_same(tight[0], tight[1])
    assert_same(one_rank.run("ranks.tasks.train", **run_settings | {"moe": {"capacity_factor": 1.0}}), tight[0])
    assert max_relative_difference(tight[0]["loss"], alone["gpt_oss"][0]["loss"]) > 1e-3
