"""Collectives and layouts: NCCL or RCCL with two GPUs, else a world of one; gloo on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.test_layouts import max_relative_difference
from ranks.tiny import build_model_folder

pytestmark = pytest.mark.thorough

gpu = pytest.mark.gpu


def assert_as_expected(results: dict[str, list[Any]]) -> None:
    assert len(results) > 15
    assert {name: values[0] for name, values in results.items()} == {
        name: values[1] for name, values in results.items()
    }


def test_collectives_of_one_rank(one_rank: RankPool) -> None:
    assert_as_expected(one_rank.run("gpu.tasks.collectives"))


def test_collectives_of_two_ranks(two_ranks: RankPool) -> None:
    assert_as_expected(two_ranks.run("gpu.tasks.collectives"))


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("qwen3", {"tp": 2}, id="tp"),
        pytest.param("qwen3", {"tp": 2, "sp": False}, id="tp-without-sp", marks=gpu),
        pytest.param("qwen3", {"tp": 2, "async_tp": True}, id="async-tp", marks=gpu),
        pytest.param("qwen3", {"pp": 2}, id="pp", marks=gpu),
        pytest.param("qwen3", {"pp": 2, "equal_lengths": True}, id="pp-equal-lengths", marks=gpu),
        pytest.param("qwen3", {"pp": 2, "vpp": 2}, id="vpp", marks=gpu),
        pytest.param("qwen3", {"pp": 2, "vpp": 2, "equal_lengths": True}, id="vpp-equal-lengths", marks=gpu),
        pytest.param("qwen3", {"cp": 2}, id="cp", marks=gpu),
        pytest.param("qwen3", {"fsdp": True}, id="fsdp", marks=gpu),
        pytest.param("qwen3", {}, id="dp", marks=gpu),
        pytest.param("qwen3_moe", {"ep": 2}, id="ep", marks=gpu),
        pytest.param("qwen3_moe", {"tp": 2, "ep": 2, "etp": 1}, id="tp-ep", marks=gpu),
        pytest.param("deepseek_v3", {"tp": 2}, id="latent-tp", marks=gpu),
    ],
)
def test_layout_trains_like_one_rank(
    family: str,
    layout: dict[str, Any],
    one_rank: RankPool,
    two_ranks: RankPool,
    samples: Path,
    tmp_path: Path,
    tolerance: float,
) -> None:
    model = build_model_folder(tmp_path / "model", family)
    run = {"model": model, "samples": samples, "steps": 3, "micro_batch_size": 2}
    expected, got = one_rank.run("ranks.tasks.train", **run), two_ranks.run("ranks.tasks.train", **run | layout)
    assert got["loss_tokens"] == expected["loss_tokens"]
    for curve in ("loss", "grad_norm"):
        assert max_relative_difference(got[curve], expected[curve]) < tolerance
