"""Mamba's mixers in layouts of several ranks, compared with one rank in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.test_layouts import TOLERANCE, max_relative_difference
from ranks.tiny import build_model_folder

LENGTHS = [1, 17, 5, 9]
SIZES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_d_state": 8, "num_hidden_layers": 2, "num_key_value_heads": 4},
    "falcon_h1": {
        "mamba_d_state": 8, "num_hidden_layers": 1, "num_key_value_heads": 4, "mamba_rms_norm": True,
        "mamba_norm_before_gate": True, "ssm_multipliers": [0.9, 1.1, 1.3, 0.7, 1.6],
    },
    "jamba": {"num_experts": 1, "num_key_value_heads": 4},
}  # fmt: skip


@pytest.mark.thorough_cases("mamba1-tp2", "norm-before-gate-tp2", "own-groups-tp2", "shared-group-tp4")
@pytest.mark.parametrize(
    ("family", "settings", "layout"),
    [
        pytest.param("bamba", {"mamba_n_groups": 2}, {"tp": 2}, id="own-groups-tp2"),
        pytest.param("bamba", {"mamba_n_groups": 1}, {"tp": 2, "sp": True}, id="shared-group-tp2-sp"),
        pytest.param("bamba", {"mamba_n_groups": 1}, {"tp": 4}, id="shared-group-tp4"),
        pytest.param("bamba", {"mamba_n_groups": 2}, {"tp": 4}, id="shared-groups-tp4"),
        pytest.param("falcon_h1", {"mamba_n_groups": 1}, {"tp": 2}, id="norm-before-gate-tp2"),
        pytest.param("jamba", {}, {"tp": 2}, id="mamba1-tp2"),
    ],
)
def test_logits_and_gradients_in_float64(
    family: str, settings: dict[str, Any], layout: dict[str, Any], worlds: dict[int, RankPool], tmp_path: Path
) -> None:
    """Nothing is computed in float32: the differences would be 1e-7."""
    model = build_model_folder(tmp_path / "model", family, **SIZES[family], **settings)
    run = {"model": model, "lengths": LENGTHS, "file": tmp_path / "alone.pt"}
    worlds[1].run("ranks.mamba_tasks.save_float64", **run)
    results = worlds[layout["tp"]].run("ranks.mamba_tasks.differences_from_float64", **run, **layout)
    assert max(results.values()) < 1e-12, results


@pytest.mark.thorough
def test_steps_of_ranks_that_share_a_group(
    one_rank: RankPool, worlds: dict[int, RankPool], samples: Path, tmp_path: Path
) -> None:
    """Also with recomputation, and resumed with other numbers of ranks."""
    model = build_model_folder(tmp_path / "model", "bamba", mamba_n_groups=1, **SIZES["bamba"])
    run = {"model": model, "samples": samples, "micro_batch_size": 2, "steps": 4}
    truth = one_rank.run("ranks.tasks.train", **run)
    ours = worlds[2].run("ranks.tasks.train", **run, tp=2, recompute="selective", save_at=[2], root=tmp_path / "root")
    rest = worlds[4].run("ranks.tasks.train", **run, tp=4, resume=tmp_path / "root/iter_0000002")
    alone = one_rank.run("ranks.tasks.train", **run, resume=tmp_path / "root/iter_0000002")
    for curve in ("loss", "grad_norm"):
        assert max_relative_difference(ours[curve], truth[curve]) < TOLERANCE
        for resumed in (rest, alone):
            assert max_relative_difference(resumed[curve], truth[curve][2:]) < TOLERANCE


@pytest.mark.parametrize(
    ("family", "settings", "kernels"),
    [
        ("bamba", {"mamba_n_groups": 1}, ["causal_conv1d_fn", "mamba_chunk_scan_combined"]),
        ("jamba", {}, ["causal_conv1d_fn", "selective_scan_fn"]),
        ("qwen3_next", {}, ["causal_conv1d_fn"]),
    ],
)
def test_kernels_of_a_model(
    family: str, settings: dict[str, Any], kernels: list[str], two_ranks: RankPool, tmp_path: Path
) -> None:
    model = build_model_folder(tmp_path / "model", family, **SIZES.get(family, {}), **settings)
    results = two_ranks.run("ranks.mamba_tasks.with_kernels", model=model, lengths=LENGTHS, tp=2)
    assert results["called"] == kernels and all(": the kernel of " in line for line in results["messages"]), results
    assert results["difference"] < 3e-2, results
