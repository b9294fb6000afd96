"""Reference DPO with transformers and torch, one pair at a time."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM

from isthmus.data.batching.batches import BatchSettings, PairBatches
from isthmus.data.batching.packed_batch import PackedBatch
from ranks.tasks import CLIP_GRAD
from ranks.tiny import GLOBAL_BATCH_SIZE, SEQ_LENGTH, open_samples

PairLoss = Callable[[PackedBatch], tuple[Tensor, Tensor]]
"""The loss of a pair and the difference of its rewards, both scalars."""


def train(
    *, model: str, samples: str, lr: list[float], beta: float, smoothing: float, sft_weight: float
) -> dict[str, list[float]]:
    """Loss, accuracy and gradient norm per step; ``lr`` has one entry per step."""
    networks: list[Any] = [AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32) for _ in range(2)]
    policy, reference = networks[0].train(), networks[1].eval()

    def loss_of(batch: PackedBatch) -> tuple[Tensor, Tensor]:
        chosen, rejected = _log_probs(policy, batch)
        with torch.no_grad():
            reference_chosen, reference_rejected = _log_probs(reference, batch)
        reward = beta * ((chosen.sum() - reference_chosen.sum()) - (rejected.sum() - reference_rejected.sum()))
        loss = -(1 - smoothing) * logsigmoid(reward) - smoothing * logsigmoid(-reward)
        return loss - sft_weight * chosen.mean(), reward

    return train_pairs(policy, loss_of, samples=samples, lr=lr)


def train_pairs(policy: Any, loss_of: PairLoss, *, samples: str | Path, lr: list[float]) -> dict[str, list[float]]:
    """Curves of a plain loop over pairs with AdamW."""
    batches = PairBatches(
        open_samples(samples),
        BatchSettings(seq_length=SEQ_LENGTH, micro_batch_size=1, global_batch_size=GLOBAL_BATCH_SIZE, packing=False),
    )
    accuracies: list[float] = []

    def mean_loss(step: int) -> Tensor:
        losses, rewards = zip(*map(loss_of, batches.step(step)), strict=True)
        accuracies.append(float(torch.stack(rewards).gt(0).double().mean()))
        return torch.stack(losses).mean()

    return train_steps(policy, mean_loss, lr=lr) | {"rewards/accuracies": accuracies}


def train_steps(policy: Any, loss_of: Callable[[int], Tensor], *, lr: list[float]) -> dict[str, list[float]]:
    """Losses and gradient norms of a plain loop with AdamW; ``loss_of`` gives the loss of a step."""
    with_decay = [parameter for parameter in policy.parameters() if parameter.dim() > 1]
    without_decay = [parameter for parameter in policy.parameters() if parameter.dim() <= 1]
    groups = [{"params": with_decay, "weight_decay": 0.1}, {"params": without_decay, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), eps=1e-8)
    curves: dict[str, list[float]] = {"loss": [], "grad_norm": []}
    for step, rate in enumerate(lr):
        loss = loss_of(step)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), CLIP_GRAD)
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        curves["loss"].append(loss.item())
        curves["grad_norm"].append(norm.item())
    return curves


def _log_probs(network: Any, batch: PackedBatch) -> list[Tensor]:
    """Log-probabilities of the tokens of the chosen and of the rejected answer, each [n]."""
    assert batch.labels is not None and batch.loss_mask is not None
    bounds, result = [*itertools.accumulate(batch.lengths, initial=0)], []
    for sample in (slice(*bounds[k : k + 2]) for k in range(2)):
        logits = network(batch.input_ids[None, sample]).logits[0]
        log_probs = logits.log_softmax(-1).gather(1, batch.labels[sample, None])[:, 0]
        result.append(log_probs[batch.loss_mask[sample]])
    return result
