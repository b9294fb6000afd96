"""Every parallel layout trains like one process: losses and gradient norms of all steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.tasks import CLIP_GRAD, TOTAL_STEPS
from ranks.tiny import build_model_folder

TOLERANCE = 1e-5
"""Relative; float32 in another order of summation gives about 1e-7."""
CURVES = ("loss", "grad_norm")


def max_relative_difference(got: list[float], expected: list[float]) -> float:
    """The largest relative difference of two curves."""
    return max(abs(a - b) / abs(b) for a, b in zip(got, expected, strict=True))


@pytest.fixture(scope="module")
def alone(one_rank: RankPool, models: dict[str, Path], samples: Path) -> dict[str, dict[str, Any]]:
    """The single-process result of each model."""
    return {
        name: one_rank.run("ranks.tasks.train", model=folder, samples=samples, micro_batch_size=2, evaluate=True)
        for name, folder in models.items()
    }


def assert_same(run: dict[str, Any], truth: dict[str, Any]) -> None:
    steps = len(run["loss"])
    assert run["loss_tokens"] == truth["loss_tokens"][:steps]
    assert run["lr"] == truth["lr"][:steps]
    differences = {curve: max_relative_difference(run[curve], truth[curve][:steps]) for curve in CURVES}
    assert max(differences.values()) < TOLERANCE
    for key in ("valid_before", "valid_after")[: 1 if steps < TOTAL_STEPS else 2]:
        assert run[key] == pytest.approx(truth[key], rel=TOLERANCE)


def test_twenty_steps_reduce_the_loss(one_rank: RankPool, models: dict[str, Path], samples: Path) -> None:
    run = {"model": models["qwen3-tied"], "samples": samples, "micro_batch_size": 2, "evaluate": True, "steps": 20}
    result = one_rank.run("ranks.tasks.train", **run, optim={"schedule": "constant"})
    assert result["loss"][-1] < result["loss"][0] - 0.5
    assert result["valid_after"] < result["valid_before"] - 0.5


def test_single_process_clips_some_steps(alone: dict[str, dict[str, Any]]) -> None:
    for run in alone.values():
        assert len(run["loss"]) == TOTAL_STEPS
        assert run["valid_after"] < run["valid_before"]
        assert min(run["grad_norm"]) < CLIP_GRAD < max(run["grad_norm"])
        assert len(set(run["loss_tokens"])) > TOTAL_STEPS // 2


@pytest.mark.thorough
def test_gradient_norm_of_a_large_vocabulary(worlds: dict[int, RankPool], samples: Path, tmp_path: Path) -> None:
    """The sum of squares of 2 million gradients does not depend on their shards."""
    settings = {"vocab_size": 64_000, "num_hidden_layers": 1, "tie_word_embeddings": True}
    model = build_model_folder(tmp_path / "model", "qwen3", **settings)
    norms = [
        worlds[ranks].run("ranks.tasks.train", model=model, samples=samples, steps=2, **layout)["grad_norm"]
        for ranks, layout in ((1, {"micro_batch_size": 2}), (2, {"tp": 2}), (2, {}), (2, {"fsdp": True}))
    ]
    assert max(max_relative_difference(other, norms[0]) for other in norms[1:]) < 1e-6


BY_NAME: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"tp": 2, "sp": False}),
    "tp2-sp": (2, {"tp": 2, "sp": True}),
    "pp2": (2, {"pp": 2}),
    "dp2": (2, {"micro_batch_size": 1}),
    "tp2-pp2": (4, {"tp": 2, "pp": 2, "micro_batch_size": 4}),
}


@pytest.mark.thorough_cases("qwen2-untied-tp2-pp2", "qwen3-tied-pp2", "qwen3-tied-tp2-pp2", "qwen3-tied-tp2")
@pytest.mark.parametrize(
    ("name", "layout"),
    # Untied embeddings matter with several stages and a sharded vocabulary.
    [*(("qwen3-tied", layout) for layout in BY_NAME), ("qwen2-untied", "tp2-pp2")],
)
def test_layout_trains_as_single_process(
    name: str,
    layout: str,
    worlds: dict[int, RankPool],
    models: dict[str, Path],
    samples: Path,
    alone: dict[str, dict[str, Any]],
) -> None:
    ranks, sizes = BY_NAME[layout]
    run = worlds[ranks].run(
        "ranks.tasks.train", model=models[name], samples=samples, evaluate=True, **{"micro_batch_size": 2, **sizes}
    )
    assert_same(run, alone[name])


EXPERTS = {
    "qwen2_moe": ({"mlp_only_layers": [1]}, ["tp2-sp", "pp2"]),
    "deepseek_v3": ({"num_hidden_layers": 2}, ["tp2-sp"]),
    "gpt_oss": ({"num_hidden_layers": 2}, ["tp2"]),
}


@pytest.mark.thorough_cases("deepseek_v3-tp2-sp", "gpt_oss-tp2", "qwen2_moe-pp2")
@pytest.mark.parametrize(
    ("family", "layout"), [(family, layout) for family, (_, layouts) in EXPERTS.items() for layout in layouts]
)
def test_moe_trains_as_single_process(
    family: str, layout: str, one_rank: RankPool, worlds: dict[int, RankPool], samples: Path, tmp_path: Path
) -> None:
    """With dense layers, shared experts and biases."""
    model = build_model_folder(tmp_path / "model", family, **EXPERTS[family][0])
    ranks, sizes = BY_NAME[layout]
    run = {"model": model, "samples": samples, "steps": 4, "evaluate": True, "micro_batch_size": 2}
    truth = one_rank.run("ranks.tasks.train", **run)
    result = worlds[ranks].run("ranks.tasks.train", **run | sizes)
    assert_same(result, truth)
    assert result["valid_after"] == pytest.approx(truth["valid_after"], rel=TOLERANCE)


def test_moe_resumes_in_another_layout(one_rank: RankPool, two_ranks: RankPool, samples: Path, tmp_path: Path) -> None:
    """Also with activation recomputation."""
    settings = {
        "model": build_model_folder(tmp_path / "model", "deepseek_v3", num_hidden_layers=2),
        "samples": samples,
        "steps": 4,
        "micro_batch_size": 2,
    }
    truth = two_ranks.run("ranks.tasks.train", **settings, tp=2, save_at=[2], root=tmp_path / "checkpoints")
    for recompute in ("selective", "full"):
        resume = tmp_path / "checkpoints" / "iter_0000002"
        run = one_rank.run("ranks.tasks.train", **settings, resume=resume, recompute=recompute)
        assert max(max_relative_difference(run[curve], truth[curve][2:]) for curve in CURVES) < TOLERANCE


@pytest.mark.thorough_cases("tp4-of-two-groups")
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        # Two query groups over four ranks: each rank has half a group.
        pytest.param("qwen3-tied", {"tp": 4}, id="tp4-of-two-groups"),
        pytest.param("qwen2-untied", {"tp": 2}, id="tp2-dp2"),
        pytest.param("qwen3-tied", {"pp": 2}, id="pp2-dp2"),
    ],
)
def test_first_steps_on_four_ranks(
    name: str,
    layout: dict[str, Any],
    four_ranks: RankPool,
    models: dict[str, Path],
    samples: Path,
    alone: dict[str, dict[str, Any]],
) -> None:
    run = four_ranks.run(
        "ranks.tasks.train", model=models[name], samples=samples, micro_batch_size=4, steps=5, evaluate=True, **layout
    )
    del run["valid_after"]
    assert_same(run, alone[name])


@pytest.mark.thorough_cases("4-layout1")
@pytest.mark.parametrize(("ranks", "layout"), [(1, {}), (4, {"tp": 2})])
def test_bf16_follows_fp32(
    ranks: int,
    layout: dict[str, Any],
    worlds: dict[int, RankPool],
    models: dict[str, Path],
    samples: Path,
    alone: dict[str, dict[str, Any]],
) -> None:
    run = worlds[ranks].run(
        "ranks.tasks.train",
        model=models["qwen3-tied"],
        samples=samples,
        micro_batch_size=2,
        steps=TOTAL_STEPS,
        precision="bf16",
        **layout,
    )
    truth = alone["qwen3-tied"]
    differences = {curve: max_relative_difference(run[curve], truth[curve]) for curve in CURVES}
    # 8 bits of mantissa; a missing or doubled gradient would differ by tenths.
    assert differences["loss"] < 0.003
    assert differences["grad_norm"] < 0.02


def test_micro_batch_size_does_not_change_the_loss(
    one_rank: RankPool, models: dict[str, Path], samples: Path, alone: dict[str, dict[str, Any]]
) -> None:
    run = one_rank.run(
        "ranks.tasks.train", model=models["llama-tied"], samples=samples, micro_batch_size=4, evaluate=True
    )
    assert_same(run, alone["llama-tied"])


def test_without_packing(one_rank: RankPool, two_ranks: RankPool, models: dict[str, Path], samples: Path) -> None:
    layout = {"model": models["qwen3-tied"], "samples": samples, "packing": False, "evaluate": True, "steps": 5}
    truth = one_rank.run("ranks.tasks.train", **layout)
    assert_same(two_ranks.run("ranks.tasks.train", tp=2, micro_batch_size=4, **layout), truth)


@pytest.mark.thorough_cases("full")
@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_is_bitwise_identical(
    recompute: str, one_rank: RankPool, models: dict[str, Path], samples: Path, alone: dict[str, dict[str, Any]]
) -> None:
    run = one_rank.run(
        "ranks.tasks.train",
        model=models["qwen3-tied"],
        samples=samples,
        micro_batch_size=2,
        recompute=recompute,
        evaluate=True,
    )
    assert run == alone["qwen3-tied"]


@pytest.mark.thorough_cases("layout1")
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
def test_full_recompute_over_ranks(
    layout: dict[str, int],
    two_ranks: RankPool,
    models: dict[str, Path],
    samples: Path,
    alone: dict[str, dict[str, Any]],
) -> None:
    run = two_ranks.run(
        "ranks.tasks.train",
        model=models["qwen3-tied"],
        samples=samples,
        micro_batch_size=2,
        steps=5,
        recompute="full",
        evaluate=True,
        **layout,
    )
    assert_same(run, alone["qwen3-tied"])


def test_async_tp_trains_as_single_process(
    worlds: dict[int, RankPool], models: dict[str, Path], samples: Path, alone: dict[str, dict[str, Any]]
) -> None:
    """With biases. Symmetric memory itself needs GPUs."""
    layout = {"tp": 2, "sp": True, "micro_batch_size": 2, "steps": 3, "recompute": "full", "evaluate": True}
    run = worlds[2].run("ranks.tasks.train_with_async_tp", model=models["qwen2-untied"], samples=samples, **layout)
    assert_same(run, alone["qwen2-untied"])
    assert min(run["calls"].values()) > 2 * 3
