"""Preference losses equal TRL's on the same pairs: losses and gradient norms over several steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from isthmus.data.batching.packed_batch import PackedBatch
from optional_packages import trl
from parity.preference_loss import PairLoss, train_pairs
from ranks.rank_pool import RankPool
from ranks.test_layouts import max_relative_difference
from ranks.tiny import build_model_folder, build_pairs

pytestmark = trl.required

BETA = 0.3


def answers(batch: PackedBatch) -> list[tuple[list[int], list[int]]]:
    """Tokens of each sample, and which of them have a loss."""
    assert batch.labels is not None and batch.loss_mask is not None
    result, start = [], 0
    for length in batch.sample_lengths:
        span = slice(start, start + length)
        tokens = [*batch.input_ids[span].tolist(), int(batch.labels[start + length - 1])]
        result.append((tokens, [0, *batch.loss_mask[span].int().tolist()]))
        start += length
    return result


def padded(rows: list[list[int]], value: int) -> Tensor:
    width = max(map(len, rows))
    return torch.tensor([row + [value] * (width - len(row)) for row in rows])


def arguments(kind: Any, out: Path, **settings: Any) -> Any:
    return kind(
        output_dir=str(out),
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        **settings,
    )


def tokenizer() -> PreTrainedTokenizerFast:
    """TRL's trainers need one; the pairs are tokens already."""
    words = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="a", eos_token="b", bos_token="b")


def dpo_loss(policy: Any, reference: Any, out: Path, *, loss: str, smoothing: float) -> PairLoss:
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    trainer = DPOTrainer(
        model=policy,
        ref_model=reference,
        args=arguments(DPOConfig, out, beta=BETA, loss_type=[loss], label_smoothing=smoothing, disable_dropout=False),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "a", "rejected": "b"}]),
        processing_class=tokenizer(),
    )

    def loss_of(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        rows, masks = zip(*answers(batch), strict=True)
        inputs = {"input_ids": padded(list(rows), 0), "completion_mask": padded(list(masks), 0)}
        inputs["attention_mask"] = padded([[1] * len(row) for row in rows], 0)
        result = trainer.compute_loss(policy, inputs)
        return result, torch.tensor(trainer._metrics["train"]["rewards/margins"][-1])

    return loss_of


def cpo_loss(policy: Any, out: Path, *, loss: str, smoothing: float) -> PairLoss:
    """CPO and SimPO."""
    from datasets import Dataset
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    alpha = {"cpo": 1.0, "simpo": 0.0}[loss]
    settings = {"loss_type": "simpo" if loss == "simpo" else "sigmoid", "label_smoothing": smoothing}
    trainer = CPOTrainer(
        model=policy,
        args=arguments(CPOConfig, out, beta=BETA, cpo_alpha=alpha, simpo_gamma=0.2, disable_dropout=False, **settings),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "a", "rejected": "b"}]),
        processing_class=tokenizer(),
    )
    return lambda batch: _loss_and_margin(trainer.get_batch_loss_metrics(policy, _labelled(batch)))


def orpo_loss(policy: Any, out: Path) -> PairLoss:
    from datasets import Dataset
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    trainer = ORPOTrainer(
        model=policy,
        args=arguments(ORPOConfig, out, beta=BETA, disable_dropout=False),
        train_dataset=Dataset.from_list([{"prompt": "a", "chosen": "a", "rejected": "b"}]),
        processing_class=tokenizer(),
    )

    def loss_of(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        labelled = _labelled(batch)
        result, margin = _loss_and_margin(trainer.get_batch_loss_metrics(policy, labelled))
        # TRL's cross entropy includes the prompt, unlike the paper's.
        prompt = policy(labelled["chosen_input_ids"], labels=labelled["chosen_input_ids"]).loss
        answer = policy(labelled["chosen_input_ids"], labels=labelled["chosen_labels"]).loss
        return result - prompt + answer, margin

    return loss_of


def _labelled(batch: PackedBatch) -> dict[str, Tensor]:
    values = {}
    for name, (tokens, mask) in zip(("chosen", "rejected"), answers(batch), strict=True):
        ids = torch.tensor([tokens])
        values[f"{name}_input_ids"], values[f"{name}_attention_mask"] = ids, torch.ones_like(ids)
        values[f"{name}_labels"] = ids.masked_fill(torch.tensor([mask]) == 0, -100)
    return values


def _loss_and_margin(result: tuple[Tensor, dict[str, Any]]) -> tuple[Tensor, Tensor]:
    loss, metrics = result
    return loss, torch.tensor(float(metrics["rewards/margins"]))


@pytest.mark.thorough_cases("robust-0.1-more1")
@pytest.mark.parametrize(
    ("loss", "smoothing", "more"),
    [
        ("sigmoid", 0.0, {}),
        ("robust", 0.1, {}),
        ("ipo", 0.0, {"length_normalized": True}),
        ("hinge", 0.0, {}),
        ("simpo", 0.1, {"simpo_gamma": 0.2}),
        ("cpo", 0.0, {}),
        ("orpo", 0.0, {}),
    ],
)
def test_losses_equal_trl(
    loss: str, smoothing: float, more: dict[str, Any], one_rank: RankPool, tmp_path: Path
) -> None:
    model = build_model_folder(tmp_path / "model", "qwen3", tie_word_embeddings=True, num_hidden_layers=2)
    pairs = build_pairs(tmp_path / "pairs")
    settings = {"beta": BETA, "loss": loss, "label_smoothing": smoothing} | more
    ours = one_rank.run("ranks.tasks.train", model=model, samples=pairs, steps=4, micro_batch_size=4, dpo=settings)
    policy, reference = (AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2))
    if loss in ("simpo", "cpo"):
        loss_of = cpo_loss(policy, tmp_path / "trl", loss=loss, smoothing=smoothing)
    elif loss == "orpo":
        loss_of = orpo_loss(policy, tmp_path / "trl")
    else:
        loss_of = dpo_loss(policy, reference, tmp_path / "trl", loss=loss, smoothing=smoothing)
    theirs = train_pairs(policy.train(), loss_of, samples=pairs, lr=ours["lr"])
    differences = {curve: max_relative_difference(ours[curve], theirs[curve]) for curve in ("loss", "grad_norm")}
    assert max(differences.values()) < 1e-5
