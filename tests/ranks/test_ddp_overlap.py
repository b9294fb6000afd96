"""Overlapping communication with computation does not change results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.test_layouts import CURVES, max_relative_difference
from ranks.tiny import add_mtp_layers, build_model_folder

pytestmark = pytest.mark.thorough

TASK = "ranks.data_parallel_tasks.train_in_buckets"
BOTH = {"overlap_grad_reduce": True, "overlap_param_gather": True}
RECOMPUTE = {"recompute": "selective", "more": {"recompute_modules": ["layernorm", "mlp_act", "rope"]}}
"""Runs modules in the backward pass, whose hooks wait for weights."""
SMALL = 4000
"""Elements per bucket; tiny models then have several buckets."""


@pytest.mark.parametrize(
    ("name", "layout"),
    [("qwen3-tied", {"overlap_grad_reduce": True, "overlap_param_gather": False}), ("qwen2-untied", BOTH | RECOMPUTE)],
)
def test_overlap_gives_identical_results(
    name: str, layout: dict[str, Any], two_ranks: RankPool, models: dict[str, Path], samples: Path
) -> None:
    """Bitwise, including weights and optimizer state, with a single bucket."""
    run = {"model": models[name], "samples": samples, "micro_batch_size": 1, "steps": 5, "evaluate": True}
    plain = two_ranks.run("ranks.tasks.train", **run)
    overlapped = two_ranks.run(TASK, bucket_elements=None, **run | layout)
    assert overlapped["buckets"] == 1
    assert {key: overlapped[key] for key in plain} == plain


@pytest.mark.parametrize(("ranks", "pp"), [(2, 1), (4, 2)])
def test_buckets_overlap_with_computation(
    ranks: int, pp: int, worlds: dict[int, RankPool], models: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    """A checkpoint between two steps has the weights that the next forward pass gathers."""
    run = {"model": models["qwen3-tied"], "samples": samples, "micro_batch_size": 1, "evaluate": True, "pp": pp}
    run |= {"steps": 5, "save_at": [3]}
    world = worlds[ranks]
    plain = world.run("ranks.tasks.train", **run, root=tmp_path / "plain")
    overlapped = world.run(TASK, bucket_elements=SMALL, **run | BOTH, root=tmp_path / "overlapped")
    assert overlapped["buckets"] > 1
    # The first step only counts the gradients per bucket.
    assert overlapped["reduced_early"] == overlapped["buckets"] * 4
    assert overlapped["gathered_late"] >= overlapped["buckets"] * 5
    for curve in CURVES:
        assert max_relative_difference(overlapped[curve], plain[curve]) < 1e-6
    assert overlapped["valid_after"] == pytest.approx(plain["valid_after"], rel=1e-6)
    resumed = world.run(
        "ranks.tasks.train", **run | {"save_at": None, "resume": tmp_path / "overlapped" / "iter_0000003"}
    )
    for curve in CURVES:
        assert max_relative_difference(resumed[curve], plain[curve][3:]) < 1e-6


@pytest.mark.parametrize("ep", [1, 2])
def test_expert_buckets_are_synchronized(ep: int, two_ranks: RankPool, samples: Path, tmp_path: Path) -> None:
    """Expert weights are used without calling their modules; with expert parallelism they have separate buckets."""
    model = build_model_folder(tmp_path / "model", "deepseek_v3", num_hidden_layers=2)
    run = {"model": model, "samples": samples, "micro_batch_size": 1, "steps": 3, "ep": ep}
    plain = two_ranks.run("ranks.tasks.train", **run)
    overlapped = two_ranks.run(TASK, bucket_elements=SMALL, **run | BOTH)
    assert overlapped["buckets"] > 1
    for curve in CURVES:
        assert max_relative_difference(overlapped[curve], plain[curve]) < 1e-6


@pytest.mark.parametrize("mtp", [False, True])
def test_pipeline_stages_synchronize_their_buckets(
    mtp: bool, four_ranks: RankPool, samples: Path, tmp_path: Path
) -> None:
    """Virtual stages with separate buckets, and MTP layers, whose stage has a copy of the embedding."""
    layers = {"num_hidden_layers": 2, "num_mtp_layers": 1} if mtp else {"num_hidden_layers": 4}
    model = build_model_folder(tmp_path / "model", "deepseek_v3" if mtp else "qwen3", **layers)
    if mtp:
        add_mtp_layers(model)
    run = {"model": model, "samples": samples, "micro_batch_size": 1, "steps": 3, "pp": 2, "vpp": 1 if mtp else 2}
    plain = four_ranks.run("ranks.tasks.train", **run)
    overlapped = four_ranks.run(TASK, bucket_elements=SMALL, **run | BOTH)
    for curve in (*CURVES, *(["mtp_loss"] if mtp else [])):
        assert max_relative_difference(overlapped[curve], plain[curve]) < 1e-6
