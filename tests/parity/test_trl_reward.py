"""Reward models equal TRL's and transformers': losses and gradient norms over several steps, and scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from isthmus.data.batching.batches import BatchSettings, PairBatches
from isthmus.data.store.answer_views import AnswerEnd, ScoredSamples
from optional_packages import trl
from parity.preference_loss import train_steps
from parity.test_trl import arguments, padded, tokenizer
from ranks.rank_pool import RankPool
from ranks.test_layouts import max_relative_difference
from ranks.tiny import GLOBAL_BATCH_SIZE, SEQ_LENGTH, VOCAB, build_model_folder, build_pairs, open_samples

pytestmark = trl.required
CENTER = 0.05


def test_losses_equal_trl(one_rank: RankPool, tmp_path: Path) -> None:
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    base = build_model_folder(tmp_path / "base", "qwen3", tie_word_embeddings=True, num_hidden_layers=2)
    samples = build_pairs(tmp_path / "pairs", margins=True)
    reward = {"center_rewards_coefficient": CENTER}
    # The first run makes the head, and exports the model that both programs train.
    common: dict[str, Any] = {"samples": samples, "reward": reward}
    model = tmp_path / "model"
    one_rank.run("ranks.tasks.save_and_export", model=base, root=tmp_path / "root", destination=model, **common)
    ours = one_rank.run("ranks.tasks.train", model=model, steps=4, micro_batch_size=2, **common)
    network = AutoModelForSequenceClassification.from_pretrained(model, dtype=torch.float32)
    assert network.config.num_labels == 1 and tuple(network.score.weight.shape) == (1, 32)
    network.config.pad_token_id = VOCAB  # no sample has it
    args = arguments(RewardConfig, tmp_path / "trl", disable_dropout=False, **reward)
    trainer = RewardTrainer(
        model=network,
        args=args,
        train_dataset=Dataset.from_list([{"chosen_ids": [1, 2], "rejected_ids": [1, 3]}]),
        processing_class=tokenizer(),
    )
    network.config.pad_token_id = VOCAB
    network.resize_token_embeddings(VOCAB + 1)
    batches = PairBatches(
        ScoredSamples(open_samples(samples), AnswerEnd(), most=SEQ_LENGTH),
        BatchSettings(
            seq_length=SEQ_LENGTH,
            micro_batch_size=GLOBAL_BATCH_SIZE,
            global_batch_size=GLOBAL_BATCH_SIZE,
            packing=False,
        ),
    )

    def loss_of(step: int) -> Tensor:
        (batch,) = batches.step(step)
        rows = [part.tolist() for part in batch.input_ids.split(batch.lengths)]
        rows = rows[::2] + rows[1::2]
        inputs = {"input_ids": padded(rows, VOCAB), "attention_mask": padded([[1] * len(row) for row in rows], 0)}
        return trainer.compute_loss(network, inputs | {"margin": torch.tensor(batch.values[::2])})

    theirs = train_steps(network.train(), loss_of, lr=ours["lr"])
    differences = {curve: max_relative_difference(ours[curve], theirs[curve]) for curve in ("loss", "grad_norm")}
    assert max(differences.values()) < 1e-5
