"""Checkpoints, resume, optimizer offload and compiled regions."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.tiny import build_model_folder

gpu = pytest.mark.gpu


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 80 million parameters, of which none is large: the state is much more than what else a step allocates."""
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "vocab_size": 8000, "head_dim": 64}
    folder = tmp_path_factory.mktemp("large") / "model"
    return build_model_folder(folder, "qwen3", num_attention_heads=16, num_key_value_heads=8, **sizes)


@pytest.mark.thorough_cases("fp32")
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=gpu)])
def test_resume(precision: str, one_rank: RankPool, samples: Path, tmp_path: Path, tolerance: float) -> None:
    run: dict[str, Any] = {"model": build_model_folder(tmp_path / "model", "qwen3"), "samples": samples}
    run |= {"precision": precision, "steps": 4}
    full = one_rank.run("ranks.tasks.train", **run, save_at=[2], root=tmp_path / "checkpoints")
    resumed = one_rank.run("ranks.tasks.train", **run, resume=tmp_path / "checkpoints" / "iter_0000002")
    for curve in ("loss", "grad_norm"):
        assert resumed[curve] == pytest.approx(full[curve][2:], rel=tolerance)


@gpu
def test_a_checkpoint_needs_little_memory(one_rank: RankPool, large: Path, samples: Path, tmp_path: Path) -> None:
    """Less than one float32 copy of the weights; the state is 18 bytes a parameter."""
    results = one_rank.run("gpu.tasks.checkpoint_peak", model=large, samples=samples, precision="bf16", root=tmp_path)
    assert results["peak"] - results["before"] < 4 * results["parameters"], results


@gpu
def test_offload_lowers_the_peak(one_rank: RankPool, large: Path, samples: Path) -> None:
    """By most of the 8 bytes a parameter that the moments have: they are never on the GPU all at once."""
    run = {"model": large, "samples": samples, "precision": "bf16"}
    remaining, offloaded = (
        one_rank.run("gpu.tasks.training_peak", **run, optim={"offload": offload}) for offload in (False, True)
    )
    assert remaining["peak"] - offloaded["peak"] > 6 * remaining["parameters"], (remaining, offloaded)


@gpu
def test_gradients_and_state_leave_for_generation(one_rank: RankPool, large: Path, samples: Path) -> None:
    """Most of their 16 bytes a parameter; the steps after it are the same."""
    run = {"model": large, "samples": samples, "precision": "bf16"}
    result = one_rank.run("gpu.tasks.memory_without_state", **run)
    assert result["before"] - result["within"] > 15 * result["parameters"], result
    assert result["after"] == pytest.approx(result["before"], rel=0.01), result
    runs = [one_rank.run("ranks.tasks.train", **run, steps=3, offload=offload) for offload in (False, True)]
    assert runs[0]["loss"] == runs[1]["loss"] and runs[0]["grad_norm"] == runs[1]["grad_norm"]


@gpu
@pytest.mark.parametrize(("family", "precision", "tolerance"), [("qwen3", "fp32", 1e-4), ("qwen3_moe", "bf16", 2e-2)])
def test_compiled_regions(
    family: str,
    precision: str,
    tolerance: float,
    one_rank: RankPool,
    samples: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    """They compute what eager regions do; graphs of the first two and of all steps are reported."""
    run = {"model": build_model_folder(tmp_path / "model", family), "samples": samples, "precision": precision}
    results = one_rank.run("gpu.tasks.compiled", **run, steps=6, timeout_s=540)
    assert results["compiled"] == pytest.approx(results["eager"], rel=tolerance)
    record_property("graphs", results["graphs"])
    assert results["graphs"][0] > 0, results
