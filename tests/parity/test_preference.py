"""DPO equals a reference implementation with plain transformers: losses and gradient norms."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.rank_pool import RankPool
from ranks.test_layouts import max_relative_difference
from ranks.tiny import build_model_folder, build_pairs


@pytest.mark.thorough_cases("0.2-0.5")
@pytest.mark.parametrize(("smoothing", "sft_weight"), [(0.0, 0.0), (0.2, 0.5)])
def test_five_steps_equal_plain_transformers(
    smoothing: float, sft_weight: float, one_rank: RankPool, tmp_path: Path
) -> None:
    """Isthmus packs pairs; the reference runs each sample alone."""
    model = build_model_folder(tmp_path / "model", "qwen3", tie_word_embeddings=True, num_hidden_layers=2)
    pairs = build_pairs(tmp_path / "pairs")
    dpo = {"beta": 0.3, "label_smoothing": smoothing, "sft_weight": sft_weight}
    run = {"model": model, "samples": pairs, "steps": 5, "micro_batch_size": 4}
    ours = one_rank.run("ranks.tasks.train", dpo=dpo, **run)
    reference = {"beta": 0.3, "smoothing": smoothing, "sft_weight": sft_weight}
    theirs = one_rank.run("parity.preference_loss.train", model=model, samples=pairs, lr=ours["lr"], **reference)
    differences = {curve: max_relative_difference(ours[curve], theirs[curve]) for curve in ("loss", "grad_norm")}
    assert max(differences.values()) < 1e-5
    # Until the weights change, which they do not in a step of learning rate 0, both rewards are equal, and rounding
    # decides the accuracy.
    first = 1 + ours["lr"].count(0.0)
    assert [step["rewards/accuracies"] for step in ours["metrics"]][first:] == theirs["rewards/accuracies"][first:]
    assert theirs["loss"][-1] < theirs["loss"][0]
