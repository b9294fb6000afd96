"""KTO equals TRL's on the same batches: losses, KL divergences and gradient norms over several steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from isthmus.data.batching.batches import BatchSettings, UnpairedBatches
from isthmus.data.batching.packed_batch import PackedBatch
from optional_packages import trl
from parity.preference_loss import train_steps
from parity.test_trl import BETA, answers, arguments, padded, tokenizer
from ranks.rank_pool import RankPool
from ranks.test_layouts import max_relative_difference
from ranks.tiny import GLOBAL_BATCH_SIZE, SEQ_LENGTH, build_answers, build_model_folder, open_samples

pytestmark = trl.required


def inputs(batch: PackedBatch) -> dict[str, Tensor]:
    rows, masks = zip(*answers(batch), strict=True)
    values = {"input_ids": padded(list(rows), 0), "completion_mask": padded(list(masks), 0)}
    return values | {"attention_mask": padded([[1] * len(row) for row in rows], 0)}


@pytest.mark.parametrize("loss", ["kto", "apo_zero_unpaired"])
def test_losses_equal_trl(loss: str, one_rank: RankPool, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import KTOConfig, KTOTrainer

    model = build_model_folder(tmp_path / "model", "qwen3", tie_word_embeddings=True, num_hidden_layers=2)
    samples = build_answers(tmp_path / "answers")
    weights = {"desirable_weight": 1.5, "undesirable_weight": 0.5}
    kto = {"beta": BETA, "loss": loss, **weights}
    ours = one_rank.run("ranks.tasks.train", model=model, samples=samples, steps=4, micro_batch_size=2, kto=kto)
    policy, reference = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    trainer = KTOTrainer(
        model=policy,
        ref_model=reference,
        args=arguments(KTOConfig, tmp_path / "trl", beta=BETA, loss_type=loss, disable_dropout=False, **weights),
        train_dataset=Dataset.from_list([{"prompt": "a", "completion": "b", "label": True}] * 2),
        processing_class=tokenizer(),
    )
    results: list[float] = []

    def loss_of(step: int) -> Tensor:
        (batch,) = batches.step(step)
        mismatched: dict[str, Any] = {f"KL_{name}": item for name, item in inputs(batch.mismatched or batch).items()}
        labels = torch.tensor(batch.values) > 0
        result = trainer.compute_loss(policy, inputs(batch) | mismatched | {"label": labels})
        results.append(trainer._metrics["train"]["kl"][-1])
        return result

    settings = BatchSettings(
        seq_length=SEQ_LENGTH, micro_batch_size=GLOBAL_BATCH_SIZE, global_batch_size=GLOBAL_BATCH_SIZE, packing=False
    )
    batches = UnpairedBatches(open_samples(samples), settings)
    theirs = train_steps(policy.train(), loss_of, lr=ours["lr"])
    differences = {curve: max_relative_difference(ours[curve], theirs[curve]) for curve in ("loss", "grad_norm")}
    assert max(differences.values()) < 1e-5
    if loss == "kto":
        divergences = [metrics["kl"] for metrics in ours["metrics"]]
        assert divergences == pytest.approx(results, rel=1e-5, abs=1e-6)
        assert max(divergences) > 0.01
