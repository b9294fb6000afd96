"""Logits, gradients and training steps equal those of transformers on this machine's platform."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ranks.rank_pool import RankPool
from ranks.test_layouts import max_relative_difference
from ranks.tiny import VOCAB, build_model_folder

gpu = pytest.mark.gpu
# On a CPU tests/parity has all families.
FAMILIES = [
    "qwen3",
    *(pytest.param(name, marks=gpu) for name in ("llama", "gemma2", "gpt2", "gpt_oss", "deepseek_v3", "qwen3_moe")),
]
LENGTHS = [40, 7, 1, 23]
# torch's grouped GEMM needs rows of whole 16 bytes.
SIZES: dict[str, dict[str, Any]] = {name: {"moe_intermediate_size": 16} for name in ("deepseek_v3", "qwen3_moe")}

# Rounding to bfloat16 sends some tokens to other experts: every token goes to all.
ALL_EXPERTS: dict[str, dict[str, Any]] = {
    "gpt_oss": {"num_experts_per_tok": 6},
    "qwen3_moe": {"num_experts_per_tok": 6},
    "deepseek_v3": {"num_experts_per_tok": 6, "n_group": 1},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32_logits_and_gradients(family: str, one_rank: RankPool, tmp_path: Path) -> None:
    model = build_model_folder(tmp_path / "model", family, num_hidden_layers=2, **SIZES.get(family, {}))
    logits = one_rank.run("parity.tasks.logits", model=model, other=None, lengths=LENGTHS, vocab_size=VOCAB)
    assert max(logits.values()) < 1e-4
    gradients = one_rank.run("parity.tasks.gradients", model=model, length=40, vocab_size=VOCAB)
    assert max(gradients.values()) < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_errors_are_those_of_transformers(family: str, one_rank: RankPool, tmp_path: Path) -> None:
    """The distance of bfloat16 logits and gradients from float32 is at most 1.2 times that of transformers."""
    sizes = SIZES.get(family, {}) | ALL_EXPERTS.get(family, {})
    model = build_model_folder(tmp_path / "model", family, num_hidden_layers=2, **sizes)
    for task, settings in (("rounding", {"lengths": LENGTHS}), ("gradient_rounding", {"length": 40})):
        error = one_rank.run(f"parity.tasks.{task}", model=model, vocab_size=VOCAB, **settings)
        print(family, task, error)
        assert 0 < error["ours"] < 1.2 * error["theirs"], task


@pytest.mark.parametrize("family", FAMILIES)
def test_first_steps(family: str, one_rank: RankPool, samples: Path, tmp_path: Path, tolerance: float) -> None:
    """Losses and gradient norms; transformers runs on the CPU in float32."""
    model = build_model_folder(tmp_path / "model", family, **SIZES.get(family, {}))
    ours = one_rank.run("ranks.tasks.train", model=model, samples=samples, micro_batch_size=2, steps=3)
    theirs = one_rank.run("parity.tasks.train", model=model, samples=samples, lr=ours["lr"], weight_decay=0.1)
    for curve in ("loss", "grad_norm"):
        assert max_relative_difference(ours[curve], theirs[curve]) < tolerance
