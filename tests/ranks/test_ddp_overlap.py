"""Exchanging gradients and weights beside the computation changes nothing but the time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.test_layouts import CURVES, furthest
from ranks.tiny import add_mtp_layers, build_model_folder

TASK = "ranks.data_parallel_tasks.train_in_buckets"
BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True}
SMALL = 4000
"""Elements of a bucket, so that the tiny models have several."""


@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen3-tied", {"overlap_grad_reduce": True, "overlap_param_gather": False}), ("qwen2-untied", BOTH)],
)
def test_overlap_gives_identical_results(
    name: str, layout: dict[str, Any], two: RankPool, models: dict[str, Path], samples: Path
) -> None:
    """To the last bit, weights and optimizer included, where the buckets are the same: there is one of all."""
    run = {"model": models[name], "samples": samples, "micro_batch_size": 2, "steps": 5, "evaluate": True}
    plain = two.run("ranks.tasks.train", **run)
    together = two.run(TASK, bucket_elements=None, **run | layout)
    assert together["buckets"] == 1
    assert {key: together[key] for key in plain} == plain


@pytest.mark.parametrize(("ranks", "pp"), [(2, 1), (4, 2)])
def test_buckets_overlap_with_computation(
    ranks: int, pp: int, worlds: dict[int, RankPool], models: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    """And a checkpoint between two steps holds weights that no forward pass has gathered yet."""
    run = {"model": models["qwen3-tied"], "samples": samples, "micro_batch_size": 1, "evaluate": True, "pp": pp}
    run |= {"steps": 5, "save_at": [3]}
    world = worlds[ranks]
    plain = world.run("ranks.tasks.train", **run, root=tmp_path / "plain")
    beside = world.run(TASK, bucket_elements=SMALL, **run | BOTH, root=tmp_path / "beside")
    assert beside["buckets"] > 1
    # The first step only counts how many gradients there are to wait for.
    assert beside["reduced_early"] == beside["buckets"] * 4
    assert beside["gathered_late"] >= beside["buckets"] * 5
    for curve in CURVES:
        assert furthest(beside[curve], plain[curve]) < 1e-6
    assert beside["valid_after"] == pytest.approx(plain["valid_after"], rel=1e-6)
    went_on = world.run("ranks.tasks.train", **run | {"save_at": None, "resume": tmp_path / "beside" / "iter_0000003"})
    for curve in CURVES:
        assert furthest(went_on[curve], plain[curve][3:]) < 1e-6


@pytest.mark.parametrize("ep", [1, 2])
def test_expert_buckets_are_synchronized(ep: int, two: RankPool, samples: Path, tmp_path: Path) -> None:
    """Their weights are used without calling their modules, and spread over ranks they have buckets of their own."""
    model = build_model_folder(tmp_path / "model", "deepseek_v3", num_hidden_layers=2)
    run = {"model": model, "samples": samples, "micro_batch_size": 2, "steps": 3, "ep": ep}
    plain = two.run("ranks.tasks.train", **run)
    beside = two.run(TASK, bucket_elements=SMALL, **run | BOTH)
    assert beside["buckets"] > 1
    for curve in CURVES:
        assert furthest(beside[curve], plain[curve]) < 1e-6


@pytest.mark.parametrize("mtp", [False, True])
def test_pipeline_stages_synchronize_their_buckets(mtp: bool, four: RankPool, samples: Path, tmp_path: Path) -> None:
    """Virtual stages, each with buckets of its own; and MTP layers, whose stage has a copy of the embedding."""
    layers = {"num_hidden_layers": 2, "num_mtp_layers": 1} if mtp else {"num_hidden_layers": 4}
    model = build_model_folder(tmp_path / "model", "deepseek_v3" if mtp else "qwen3", **layers)
    if mtp:
        add_mtp_layers(model)
    run = {"model": model, "samples": samples, "micro_batch_size": 2, "steps": 3, "pp": 2, "vpp": 1 if mtp else 2}
    plain = four.run("ranks.tasks.train", **run)
    beside = four.run(TASK, bucket_elements=SMALL, **run | BOTH)
    for curve in (*CURVES, *(["mtp_loss"] if mtp else [])):
        assert furthest(beside[curve], plain[curve]) < 1e-6
