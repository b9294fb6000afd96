"""Training with context parallelism equals training in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ranks.rank_pool import RankPool
from ranks.tiny import build_model_folder

TOLERANCE = 1e-5
"""Relative."""


def test_context_parallel_attention_equals_single_process(four_ranks: RankPool) -> None:
    """Output and gradients in float64; the sequences have several zigzag chunks per rank."""
    samples = (700, 20, 1680)
    runs = [((2400,), None, False), (samples, None, True), ((1500, 900), 150, True)]
    cases = [{"lengths": lengths, "window": window, "recompute": recompute} for lengths, window, recompute in runs]
    for differences in four_ranks.run("ranks.context_tasks.attend", cases=cases):
        assert max(differences.values()) < 1e-13


def assert_same(run: dict[str, Any], truth: dict[str, Any]) -> None:
    steps = len(run["loss"])
    assert run["loss_tokens"] == truth["loss_tokens"][:steps]
    for curve in ("loss", "grad_norm"):
        difference = max(abs(a - b) / abs(b) for a, b in zip(run[curve], truth[curve][:steps], strict=True))
        assert difference < TOLERANCE
    for key in ("valid_before", "valid_after")[: 2 if steps == len(truth["loss"]) else 1]:
        assert run[key] == pytest.approx(truth[key], rel=TOLERANCE)


LAYOUTS = {
    "cp2": (2, {"cp": 2}),
    "cp2-tp2-sp": (4, {"cp": 2, "tp": 2}),
    "cp2-ep2": (2, {"cp": 2, "ep": 2}),
    "cp2-pp2": (4, {"cp": 2, "pp": 2}),
    "cp2-dp2": (4, {"cp": 2}),
}
MODELS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "grouped queries": (
        "qwen3",
        {"tie_word_embeddings": True, "num_hidden_layers": 2},
        ["cp2", "cp2-tp2-sp", "cp2-pp2", "cp2-dp2"],
    ),
    "latent attention and experts": ("deepseek_v3", {"num_hidden_layers": 2}, ["cp2", "cp2-ep2", "cp2-tp2-sp"]),
    "sliding window and sinks": ("gpt_oss", {"num_hidden_layers": 2}, ["cp2"]),
    "position embeddings": ("gpt2", {"num_hidden_layers": 2}, ["cp2-tp2-sp"]),
}


@pytest.mark.thorough_cases("latent attention and experts", "position embeddings")
@pytest.mark.parametrize("name", MODELS)
def test_context_parallel_trains_as_single_process(
    name: str, one_rank: RankPool, worlds: dict[int, RankPool], samples: Path, tmp_path: Path
) -> None:
    family, settings, layouts = MODELS[name]
    model = build_model_folder(tmp_path / "model", family, **settings)
    run: dict[str, Any] = {"model": model, "samples": samples, "evaluate": True, "micro_batch_size": 2, "steps": 4}
    if "experts" in name:
        run["moe"] = {
            "aux_loss": 0.1,
            "seq_aux_loss": 0.05,
            "z_loss": 0.01,
        }  # over whole samples
    truth = one_rank.run("ranks.tasks.train", **run)
    for layout in layouts:
        ranks, sizes = LAYOUTS[layout]
        assert_same(worlds[ranks].run("ranks.tasks.train", **run, **sizes), truth)


def test_sequence_of_one_sample(
    one_rank: RankPool, two_ranks: RankPool, models: dict[str, Path], samples: Path
) -> None:
    run = {"model": models["llama-tied"], "samples": samples, "evaluate": True, "packing": False, "steps": 4}
    assert_same(two_ranks.run("ranks.tasks.train", **run, cp=2), one_rank.run("ranks.tasks.train", **run))


@pytest.mark.thorough
def test_context_parallel_with_recompute(
    one_rank: RankPool, two_ranks: RankPool, samples: Path, tmp_path: Path
) -> None:
    model = build_model_folder(tmp_path / "model", "deepseek_v3", num_hidden_layers=2)
    run: dict[str, Any] = {"model": model, "samples": samples, "steps": 2, "evaluate": True}
    truth = one_rank.run("ranks.tasks.train", **run)
    for recompute in ("selective", "full"):
        assert_same(two_ranks.run("ranks.tasks.train", **run, cp=2, recompute=recompute), truth)


@pytest.mark.thorough
def test_resume_with_another_cp(
    one_rank: RankPool, two_ranks: RankPool, models: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    run: dict[str, Any] = {"model": models["qwen2-untied"], "samples": samples, "steps": 4}
    truth = one_rank.run("ranks.tasks.train", **run, save_at=[2], root=tmp_path / "whole")
    sharded = two_ranks.run("ranks.tasks.train", **run, cp=2, save_at=[2], root=tmp_path / "sharded")
    again = one_rank.run("ranks.tasks.train", **run, resume=tmp_path / "sharded" / "iter_0000002")
    sharded_again = two_ranks.run("ranks.tasks.train", **run, cp=2, resume=tmp_path / "whole" / "iter_0000002")
    for later in (sharded["loss"][2:], again["loss"], sharded_again["loss"]):
        assert later == pytest.approx(truth["loss"][2:], rel=TOLERANCE)


def test_export_equals_single_process(
    one_rank: RankPool, two_ranks: RankPool, models: dict[str, Path], samples: Path, tmp_path: Path
) -> None:
    for name, world, sizes in (("whole", one_rank, {}), ("sharded", two_ranks, {"cp": 2})):
        folders = {"root": tmp_path / f"{name}-checkpoints", "destination": tmp_path / name}
        world.run("ranks.tasks.save_and_export", model=models["qwen3-tied"], samples=samples, **folders, **sizes)
    full, sharded = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "sharded"))
    assert full.keys() == sharded.keys()
    # The first AdamW steps have full size also for gradients near zero, where rounding decides the sign.
    assert all(torch.allclose(sharded[name], full[name], rtol=0, atol=1e-5) for name in full)


@pytest.mark.thorough
def test_memory_is_linear_in_sequence_length(
    one_rank: RankPool, two_ranks: RankPool, samples: Path, tmp_path: Path
) -> None:
    """No tensor has the size of all logits, and each of two ranks needs little more than half the memory.

    Only one block of attention scores is not sharded.
    """
    vocab, lengths = 12_000, [2048, 8192]
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "vocab_size": vocab}
    model = build_model_folder(tmp_path / "model", "llama", **sizes)
    run: dict[str, Any] = {"model": model, "samples": samples, "lengths": lengths}
    full = one_rank.run("ranks.context_tasks.memory_of_a_step", **run)
    sharded = two_ranks.run("ranks.context_tasks.memory_of_a_step", **run, cp=2)
    assert full[1]["peak"] < 4.2 * full[0]["peak"]
    for step_bytes in (full, sharded):
        assert step_bytes[1]["largest"] < 4 * 8192 * 8192 / 8
    assert sharded[1]["peak"] < 0.7 * full[1]["peak"]
