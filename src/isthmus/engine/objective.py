"""What a run minimises: what becomes of the losses of a line's tokens, and what is told of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from torch import Tensor

from isthmus.engine.parallel.context_parallel import own_part, own_spans


class PackedLine(Protocol):
    """What a step needs of a micro batch; :class:`isthmus.data.batching.batches.MicroBatch` is one."""

    @property
    def input_ids(self) -> Tensor:
        """int64 [T]"""

    @property
    def labels(self) -> Tensor:
        """int64 [T], already shifted."""

    @property
    def loss_mask(self) -> Tensor:
        """bool [T], True where the label is learned."""

    @property
    def position_ids(self) -> Tensor:
        """int64 [T], from 0 in each sample."""

    @property
    def cu_seqlens(self) -> Tensor:
        """int32 [segments + 1]"""

    @property
    def num_tokens(self) -> int:
        """Tokens of samples, padding not counted."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What an objective makes of a line."""

    loss: Tensor
    """A scalar, whose gradient is taken; over the global batch the gradients are added up and divided by the count."""
    count: int
    """What the loss is a mean over. Of ranks that share a line, one counts it."""
    loss_sum: Tensor | float
    """What is told for the loss: a sum, divided by the count as well."""
    sums: Mapping[str, Tensor | float] = field(default_factory=dict)
    """What else is told, under the names of :attr:`Objective.sums`."""


class Objective(Protocol):
    """What is made of losses; one object serves all lines of a run."""

    @property
    def each(self) -> bool:
        """Whether it wants the loss of each learned token, and not their sum."""

    @property
    def sums(self) -> Sequence[str]:
        """Names of what is added up over the global batch, beside loss and count."""

    def shares(self, line: Any) -> tuple[float, ...]:
        """What each segment of a line has in the count."""

    def measure(self, losses: Tensor, line: Any, learned: int, ahead: int, ahead_weight: float) -> Measured:
        """Make the loss of a line, on the last stage.

        Args:
            losses: as :meth:`isthmus.engine.megatron_model.Decoder.forward` returns them.
            line: of this rank.
            learned: labels learned on this context parallel rank.
            ahead: labels that layers ahead have to predict here.
            ahead_weight: what the sum of their losses counts.
        """

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """What is told of a step beside its loss, by name, from the sums over the global batch."""


class NextToken:
    """The mean of the cross entropies of all learned tokens of the global batch."""

    each = False
    sums = ("ahead_sum", "ahead_tokens")

    def shares(self, line: PackedLine) -> tuple[float, ...]:
        """The labels learned in each segment."""
        return learned_in_segments(line)

    def measure(self, losses: Tensor, line: PackedLine, learned: int, ahead: int, ahead_weight: float) -> Measured:
        """The sum, with that of the layers ahead."""
        told: dict[str, Tensor | float] = {"ahead_sum": 0.0, "ahead_tokens": 0.0}
        if losses.dim() == 0:
            return Measured(losses, learned, losses.detach().double(), told)
        loss_sum, ahead_sum = losses[0], losses[1:].sum()
        told = {"ahead_sum": ahead_sum.detach().double(), "ahead_tokens": float(ahead)}
        # Equation 25 of arXiv 2412.19437: the mean over the depths, each a mean over the tokens of the main loss.
        return Measured(loss_sum + ahead_weight * ahead_sum, learned, loss_sum.detach().double(), told)

    def figures(self, sums: Mapping[str, float], count: float) -> dict[str, float]:
        """The mean loss of the layers ahead, where there are any."""
        return {"mtp_loss": sums["ahead_sum"] / sums["ahead_tokens"]} if sums["ahead_tokens"] else {}


NEXT_TOKEN = NextToken()


def segment_lengths(line: PackedLine) -> tuple[int, ...]:
    """Tokens of each segment of a line, the padding's included."""
    return tuple(end - start for start, end in itertools.pairwise(line.cu_seqlens.tolist()))


def learned_in_segments(line: PackedLine) -> tuple[int, ...]:
    """Labels learned in each segment of a line."""
    return tuple(int(part.sum()) for part in line.loss_mask.split(segment_lengths(line)))


def log_probabilities(losses: Tensor, line: PackedLine) -> Tensor:
    """The log-probability of what is learned in each segment, float64 [segments], the same on all ranks of a line.

    Args:
        losses: float32 [n], cross entropies of this rank's learned places; their gradient is that of the whole line's.
        line: which they are of.
    """
    spans = own_spans(line.input_ids.numel())
    lengths = segment_lengths(line)
    segments = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    here = own_part(segments, spans)[own_part(line.loss_mask, spans)].bincount(minlength=len(lengths))
    # Summed piece by piece: index_add has no fixed order on a GPU.
    sums = -torch.stack([part.sum() for part in losses.double().split(here.tolist())])
    if spans is None:
        return sums
    whole: Tensor = reduce_from_tensor_model_parallel_region(sums, parallel_state.get_context_parallel_group())
    return whole


def counts_line() -> bool:
    """Whether it is this rank, of those that share a line, that counts what all of them know."""
    return parallel_state.get_context_parallel_rank() == 0
