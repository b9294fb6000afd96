"""Training objectives: the loss of a packed batch, its denominator, and the metrics of a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.host_copies import to_device
from isthmus.engine.parallel.context_parallel import local_tokens


@dataclass(frozen=True, slots=True)
class LossOutput:
    loss: Tensor
    """The scalar to differentiate. Gradients are summed over the global batch and divided by the total count."""
    count: int
    """Denominator of the mean loss. Only one of the ranks that share a packed sequence counts it."""
    loss_sum: Tensor | float
    """The reported loss, before division by the count."""
    sums: Mapping[str, Tensor | float] = field(default_factory=dict)
    """Other sums to report, by name; see :attr:`Objective.sums`."""


PerToken: TypeAlias = bool | Literal["scores", "next_tokens", "policy", "policy_entropy"]


class Objective(Protocol):
    """Turns token losses into the loss of a batch."""

    @property
    def per_token(self) -> PerToken:
        """Whether :meth:`loss` needs per-token losses instead of their sum; ``scores``: also the most probable tokens.

        ``next_tokens``: losses of these instead of the labels. Both are float64 [2, n] and have no gradient.
        ``policy``: losses and entropies at the temperature of the rollout, float32 [2, n]. The losses have a gradient,
        and the entropies with ``policy_entropy``.
        """

    @property
    def sums(self) -> Sequence[str]:
        """Names of the sums over the global batch, besides loss and count."""

    @property
    def samples_per_unit(self) -> int:
        """Samples that have a loss together, such as the 2 answers of a pair."""

    def sample_weights(self, batch: PackedBatch) -> tuple[float, ...]:
        """What each sample (each of the batch's ``lengths``) adds to the count."""

    def loss(
        self, losses: Tensor, batch: PackedBatch, *, loss_tokens: int, mtp_tokens: int, mtp_weight: float
    ) -> LossOutput:
        """Compute the loss of a batch on the last pipeline stage.

        ``batch`` has this rank's tokens, on the host. ``mtp_weight`` is the factor of the summed MTP losses.
        """

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Metrics of a step besides the loss, from the sums over the global batch."""


@runtime_checkable
class PeakObjective(Objective, Protocol):
    """An objective that also reports the largest of a value of the loss tokens of a step."""

    @property
    def peak_name(self) -> str:
        """Its name in the metrics."""

    def take_peak(self) -> Tensor | None:
        """The largest value of this rank since the last call, with sample id and position in the sample.

        Float64 [3]; None without loss tokens on this rank.
        """


MeanLoss = Callable[[Sequence[PackedBatch], Objective], float]
"""Mean loss of a global batch under another objective, without gradients; a collective."""


@runtime_checkable
class PreparedObjective(Objective, Protocol):
    """An objective that measures something of each global batch before its loss."""

    def prepare(self, batches: Sequence[PackedBatch], mean_loss: MeanLoss) -> None:
        """Called on every rank before a training step, and before each global batch of an evaluation."""


class NextToken:
    """Mean cross entropy over all loss tokens of the global batch."""

    per_token = False
    samples_per_unit = 1
    sums: tuple[str, ...] = ("mtp_loss_sum", "mtp_tokens")

    def sample_weights(self, batch: PackedBatch) -> tuple[float, ...]:
        return batch.loss_tokens

    def loss(
        self, losses: Tensor, batch: PackedBatch, *, loss_tokens: int, mtp_tokens: int, mtp_weight: float
    ) -> LossOutput:
        """Adds MTP losses as in equation 25 of arXiv 2412.19437: their mean over depths, divided by the loss tokens."""
        if losses.dim() == 0:
            return LossOutput(losses, loss_tokens, losses.detach().double(), dict.fromkeys(self.sums, 0.0))
        main, mtp = losses[0], losses[1:].sum()
        sums: dict[str, Tensor | float] = {"mtp_loss_sum": mtp.detach().double(), "mtp_tokens": float(mtp_tokens)}
        return LossOutput(main + mtp_weight * mtp, loss_tokens, main.detach().double(), sums)

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        return {"mtp_loss": sums["mtp_loss_sum"] / sums["mtp_tokens"]} if sums["mtp_tokens"] else {}


NEXT_TOKEN = NextToken()


class Distillation:
    """Mean loss of distillation over all loss tokens of the global batch."""

    per_token = False
    samples_per_unit = 1
    sums: tuple[str, ...] = ("distill_loss", "sft_loss")

    def sample_weights(self, batch: PackedBatch) -> tuple[float, ...]:
        return batch.loss_tokens

    def loss(
        self, losses: Tensor, batch: PackedBatch, *, loss_tokens: int, mtp_tokens: int, mtp_weight: float
    ) -> LossOutput:
        """``losses`` are the sums of loss, divergence and cross entropy, float32 [3]."""
        total, *parts = losses.detach().double()
        # Megatron-Core frees the memory of the loss, which must not be a view.
        return LossOutput(losses[0].clone(), loss_tokens, total, dict(zip(self.sums, parts, strict=True)))

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Divergence from the teacher, and cross entropy of the labels."""
        return {name: value / max(1, count) for name, value in sums.items()}


class NextTokenAccuracy:
    """Mean cross entropy over all loss tokens, for evaluation: with perplexity and token accuracy, without gradient."""

    per_token: Literal["scores"] = "scores"
    samples_per_unit = 1
    sums: tuple[str, ...] = ("loss", "correct")

    def sample_weights(self, batch: PackedBatch) -> tuple[float, ...]:
        return batch.loss_tokens

    def loss(
        self, losses: Tensor, batch: PackedBatch, *, loss_tokens: int, mtp_tokens: int, mtp_weight: float
    ) -> LossOutput:
        assert batch.labels is not None and batch.loss_mask is not None
        nll, tokens = losses
        total = nll.float().sum().double()  # as in training
        labels = to_device(batch.labels[batch.loss_mask], tokens.device)
        sums = {"loss": total, "correct": (tokens == labels).sum()}
        return LossOutput(total.float(), loss_tokens, total, sums)

    def metrics(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """Metrics with TRL's name for the accuracy: the share of loss tokens that are the most probable token."""
        loss = sums["loss"] / max(1, count)
        perplexity = math.exp(loss) if loss < _LARGEST_LOSS else math.inf
        return {"perplexity": perplexity, "mean_token_accuracy": sums["correct"] / max(1, count)}


_LARGEST_LOSS = 700.0
"""The perplexity of a larger loss has no float64."""


def sample_log_probs(losses: Tensor, batch: PackedBatch) -> Tensor:
    """Log-probability of each sample's loss tokens, see :func:`sample_sums`; ``losses`` are their cross entropies."""
    return sample_sums(-losses, batch)


def sample_sums(values: Tensor, batch: PackedBatch) -> Tensor:
    """Sum over each sample's loss tokens, float64 [len(batch.lengths)].

    ``values`` are float32 [n], of this rank's loss tokens. All ranks of a context parallel group get the same result,
    with the gradient of the whole packed sequence.
    """
    assert batch.loss_mask is not None
    counts: Sequence[int] = batch.loss_tokens
    if batch.spans is not None:
        samples = torch.arange(len(batch.lengths)).repeat_interleave(torch.tensor(batch.lengths))
        counts = local_tokens(samples, batch.spans)[batch.loss_mask].bincount(minlength=len(batch.lengths)).tolist()
    # Sum per sample: index_add is not deterministic on a GPU.
    sums = torch.stack([part.sum() for part in values.double().split(list(counts))])
    if batch.spans is None:
        return sums
    return reduce_from_tensor_model_parallel_region(sums, parallel_state.get_context_parallel_group())


def counts_batch() -> bool:
    """True on one of the ranks that share a packed sequence; it reports sums that all of them know."""
    return parallel_state.get_context_parallel_rank() == 0
