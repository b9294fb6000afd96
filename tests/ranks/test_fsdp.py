"""FSDP trains like one process, each rank has only its shard, and exports are complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from isthmus.platforms.torch_features import fsdp_sums_gradients
from ranks.rank_pool import RankPool
from ranks.test_layouts import CURVES, TOLERANCE, assert_same, max_relative_difference
from ranks.tiny import build_model_folder

TRAIN = "ranks.tasks.train"
RECOMPUTED = ["core_attn", "layernorm", "mlp_act", "rope"]
pytestmark = pytest.mark.skipif(
    not fsdp_sums_gradients(), reason=f"fully_shard of torch {torch.__version__} averages gradients"
)


def test_fsdp_trains_as_single_process(
    one_rank: RankPool, two_ranks: RankPool, models: dict[str, Path], samples: Path
) -> None:
    """Two micro batches per step, clipping in some steps, and an evaluation before the first step."""
    run = {"model": models["qwen3-tied"], "samples": samples, "micro_batch_size": 1, "evaluate": True}
    assert_same(two_ranks.run(TRAIN, fsdp=True, **run), one_rank.run(TRAIN, **run))


@pytest.mark.thorough_cases("cp2-dp2", "dp4", "tp2-sp-dp2", "hsdp-cp2", "hsdp-reduced-once")
@pytest.mark.parametrize(
    "layout",
    [
        # Rows of norms, experts and the vocabulary of 77 are not divisible by four ranks.
        pytest.param({"recompute": "selective", "more": {"recompute_modules": RECOMPUTED}}, id="dp4"),
        pytest.param({"tp": 2, "sp": True, "recompute": "full"}, id="tp2-sp-dp2"),
        pytest.param({"cp": 2}, id="cp2-dp2"),
        pytest.param({"fsdp": 2, "micro_batch_size": 1}, id="hsdp"),
        pytest.param({"fsdp": 2, "micro_batch_size": 1, "fsdp_reduce": "step"}, id="hsdp-reduced-once"),
        pytest.param({"fsdp": 2, "cp": 2}, id="hsdp-cp2"),
    ],
)
def test_fsdp_on_four_ranks(
    layout: dict[str, Any], one_rank: RankPool, four_ranks: RankPool, models: dict[str, Path], samples: Path
) -> None:
    run = {"model": models["qwen3-tied"], "samples": samples, "micro_batch_size": 2, "steps": 4, "evaluate": True}
    run["global_batch_size"] = 8  # two micro batches for each of four ranks
    assert_same(four_ranks.run(TRAIN, **run | {"fsdp": True} | layout), one_rank.run(TRAIN, **run))


@pytest.mark.thorough
def test_fsdp_with_moe_and_mla(
    one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool, samples: Path, tmp_path: Path
) -> None:
    """Sharded checkpoints resume without FSDP, and the other way round."""
    model = build_model_folder(tmp_path / "model", "deepseek_v3", num_hidden_layers=2)
    run = {
        "model": model,
        "samples": samples,
        "micro_batch_size": 2,
        "steps": 4,
        "moe": {"expert_bias_update_rate": 0.05},
    }
    sharded, full = tmp_path / "sharded", tmp_path / "whole"
    truth = one_rank.run(TRAIN, **run, save_at=[2], root=full)
    resumed = one_rank.run(TRAIN, **run | {"resume": full / "iter_0000002"})
    fsdp = four_ranks.run(TRAIN, fsdp=True, tp=2, sp=False, **run, save_at=[2], root=sharded)
    assert max(max_relative_difference(fsdp[curve], truth[curve]) for curve in CURVES) < TOLERANCE
    # Both checkpoints differ only by the order in which gradients are summed.
    for world, layout, folder in (
        (one_rank, {}, sharded),
        (two_ranks, {"fsdp": True}, full),
        (two_ranks, {"fsdp": True}, sharded),
    ):
        restarted = world.run(TRAIN, **run | layout | {"resume": folder / "iter_0000002"})
        assert restarted["first"] == 2
        assert max(max_relative_difference(restarted[curve], resumed[curve]) for curve in CURVES) < TOLERANCE


def test_fsdp_resume_is_bitwise_identical(
    two_ranks: RankPool, models: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    run = {"model": models["qwen3-tied"], "samples": samples, "micro_batch_size": 2, "precision": "bf16"}
    run |= {"steps": 4, "fsdp": True}
    uninterrupted = two_ranks.run(TRAIN, **run, save_at=[2], root=tmp_path)
    restarted = two_ranks.run(TRAIN, **run, resume=tmp_path / "iter_0000002")
    assert restarted["digest"] == uninterrupted["digest"]
    assert restarted["loss"] == uninterrupted["loss"][2:]


def test_hsdp_checkpoints_load_in_any_layout(
    one_rank: RankPool,
    two_ranks: RankPool,
    four_ranks: RankPool,
    models: dict[str, Path],
    samples: Path,
    tmp_path: Path,
) -> None:
    """Two equal copies over two ranks each, of which one is saved; a resumed run is bitwise the same."""
    run = {"model": models["qwen3-tied"], "samples": samples, "micro_batch_size": 1, "steps": 3}
    truth = four_ranks.run(TRAIN, **run, fsdp=2, save_at=[2], root=tmp_path)
    assert truth["digest"][:2] == truth["digest"][2:]
    run["resume"] = tmp_path / "iter_0000002"
    restarted = four_ranks.run(TRAIN, **run, fsdp=2)
    assert (restarted["digest"], restarted["loss"]) == (truth["digest"], truth["loss"][2:])
    for world, layout in ((one_rank, {}), (two_ranks, {"fsdp": True}), (four_ranks, {"fsdp": True})):
        other = world.run(TRAIN, **run, **layout)
        for curve in CURVES:
            assert max_relative_difference(other[curve], truth[curve][2:]) < TOLERANCE, (layout, curve)


@pytest.mark.thorough
def test_hsdp_loads_other_checkpoints_and_trains_with_muon(
    one_rank: RankPool, four_ranks: RankPool, models: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    run = {"model": models["qwen3-tied"], "samples": samples, "micro_batch_size": 1, "steps": 3}
    truth = one_rank.run(TRAIN, **run, save_at=[2], root=tmp_path)
    restarted = four_ranks.run(TRAIN, **run, fsdp=2, resume=tmp_path / "iter_0000002")
    assert max(max_relative_difference(restarted[curve], truth[curve][2:]) for curve in CURVES) < TOLERANCE
    run["optim"] = {"optimizer": "muon"}
    muon, truth = four_ranks.run(TRAIN, **run, fsdp=2), one_rank.run(TRAIN, **run)
    assert max(max_relative_difference(muon[curve], truth[curve]) for curve in CURVES) < 1e-4  # bfloat16 in Muon


def test_fsdp_bf16_follows_distributed_optimizer(two_ranks: RankPool, models: dict[str, Path], samples: Path) -> None:
    run = {"model": models["qwen3-tied"], "samples": samples, "micro_batch_size": 1, "precision": "bf16"}
    sharded, truth = two_ranks.run(TRAIN, fsdp=True, **run), two_ranks.run(TRAIN, **run)
    differences = {curve: max_relative_difference(sharded[curve], truth[curve]) for curve in CURVES}
    # FSDP rounds the gradient of each micro batch to bfloat16 before summing.
    assert differences["loss"] < 0.003
    assert differences["grad_norm"] < 0.02


def test_fsdp_bf16_routes_in_fp32(one_rank: RankPool, two_ranks: RankPool, samples: Path, tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "model", "deepseek_v3", num_hidden_layers=2)
    run = {"model": model, "samples": samples, "micro_batch_size": 2, "steps": 4, "precision": "bf16"}
    sharded, truth = two_ranks.run(TRAIN, fsdp=True, **run), one_rank.run(TRAIN, **run)
    assert max_relative_difference(sharded["loss"], truth["loss"]) < 0.003


def steps_of(calls: list[tuple[str, int]]) -> str:
    """Gathers in lower and reductions in upper case: the last norm, embedding or output layer (t), and layers."""
    norm, table, layer = sorted({size for kind, size in calls if "gather" in kind})
    unit_of = {norm: "n", table: "t", layer: "l"}
    units = [(unit_of[size], kind) for kind, size in calls if "gather" in kind or "scatter" in kind]
    return "".join(unit if "gather" in kind else unit.upper() for unit, kind in units)


def test_fsdp_communicates_in_units(two_ranks: RankPool, models: dict[str, Path], samples: Path) -> None:
    """In both micro batches the next layer's weights are gathered before gradients are reduced.

    The output layer is gathered after the layers and reduced before them, the embedding is gathered once.
    """
    run = {"model": models["qwen2-untied"], "samples": samples, "micro_batch_size": 1, "fsdp": True}
    calls = two_ranks.run("ranks.data_parallel_tasks.collectives", **run)
    assert steps_of(calls) == 2 * ("ntllt" + "lTlLLNT")
    assert steps_of(two_ranks.run("ranks.data_parallel_tasks.collectives", **run, recompute="full")) == steps_of(calls)


def test_gradients_may_be_reduced_once_per_step(
    two_ranks: RankPool, four_ranks: RankPool, models: dict[str, Path], samples: Path
) -> None:
    """Between copies they are so always; an abandoned step leaves no sums behind."""
    run = {"model": models["qwen2-untied"], "samples": samples, "micro_batch_size": 1, "fsdp": True}
    once = two_ranks.run("ranks.data_parallel_tasks.collectives", **run, fsdp_reduce="step")
    assert steps_of(once) == "ntllt" + "ll" + "ntllt" + "lTlLLNT"
    run |= {"fsdp": 2, "global_batch_size": 8}
    copies = four_ranks.run("ranks.data_parallel_tasks.collectives", **run)
    kinds = [kind for kind, size in copies if size > 40]
    assert (kinds.count("_reduce_scatter_base_"), kinds.count("allreduce_")) == (10, 5)
    assert kinds[: kinds.index("allreduce_")].count("_reduce_scatter_base_") == 6  # of the first micro batch, and one
    for layout in (run, run | {"fsdp_reduce": "step", "precision": "bf16"}):
        assert len(set(map(tuple, four_ranks.run("ranks.data_parallel_tasks.abandoned_steps", **layout)))) == 1


def test_fsdp_rank_has_only_its_shard(two_ranks: RankPool, models: dict[str, Path], samples: Path) -> None:
    """Also after an evaluation, which gathers all weights and has no backward pass."""
    layout = {"model": models["qwen2-untied"], "samples": samples, "fsdp": True}
    for rank in two_ranks.run("ranks.data_parallel_tasks.shares", **layout):
        for name, share in rank.items():
            assert share == pytest.approx(0.5, abs=0.01), name


@pytest.mark.thorough
def test_fsdp_export_equals_import(two_ranks: RankPool, four_ranks: RankPool, samples: Path, tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "model", "qwen2_moe", mlp_only_layers=[1], dtype=torch.bfloat16)
    for world, layout in ((two_ranks, {}), (four_ranks, {"tp": 2, "precision": "bf16"}), (four_ranks, {"fsdp": 2})):
        destination = tmp_path / f"export-{world.size}-{len(layout)}"
        world.run(
            "ranks.data_parallel_tasks.export",
            destination=destination, model=model, samples=samples, **{"fsdp": True} | layout,
        )  # fmt: skip
        expected, got = (load_file(folder / "model.safetensors") for folder in (model, destination))
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], expected[name]) for name in expected)


def test_disk_failure_stops_every_rank(
    two_ranks: RankPool, models: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    """Ranks that do not write wait for the rank that failed."""
    error = two_ranks.run(
        "ranks.data_parallel_tasks.failed_export",
        destination=tmp_path / "export", model=models["qwen3-tied"], samples=samples, fsdp=True,
    )  # fmt: skip
    assert "the disk broke" in error["text"]
    assert not (tmp_path / "export").exists()
