"""Keeping experts evenly loaded: losses that a router gets for imbalance, the bias of its choice, and what is reported.

With ``n`` for the labels learned in a span of tokens, ``N`` for those of the global batch and ``L`` for a loss over a
span, what is added to the mean loss of the batch is ``coefficient / N * sum(n * L)``: a span counts as much here as its
labels do there. A span is a micro batch for ``aux_loss`` and a sample for ``seq_aux_loss`` and ``z_loss``, so the last
two do not depend on how a batch is cut into micro batches. Padding belongs to no span. Each layer has its own losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.config.schema.moe import ROUTER_LOSSES
from isthmus.engine.layers.attention import Segments
from isthmus.engine.moe.token_dispatcher import count
from isthmus.engine.parallel.context_parallel import own_part
from isthmus.families.architecture import Moe


@dataclass(frozen=True, slots=True)
class Spans:
    """Which span each token of this rank belongs to."""

    of_token: Tensor
    """int64 [T]; the number of spans for a token of none."""
    lengths: Tensor
    """float32 [S], tokens of each, those on other ranks included."""
    learned: Tensor
    """float32 [S], labels learned in each."""

    @property
    def number(self) -> int:
        """S"""
        return self.lengths.numel()


def spans_of(segments: Segments, rank: int, ranks: int, *, device: torch.device) -> tuple[Spans, Spans]:
    """The samples of a line as spans, and the line as one.

    Args:
        segments: of the whole line, and what this context parallel rank has of it.
        rank: which of ``ranks`` equal parts of that is here.
        ranks: how many parts it has.
        device: of the result.
    """
    lengths = segments.lengths
    samples = lengths[:-1] if segments.padded else lengths
    learned = segments.learned[: len(samples)]
    numbers = torch.arange(len(lengths), device=device)
    of_token = numbers.repeat_interleave(torch.tensor(lengths, device=device), output_size=sum(lengths))
    of_token = own_part(of_token, segments.spans).chunk(ranks)[rank]

    def spans(of_token: Tensor, lengths: Sequence[int], learned: Sequence[float]) -> Spans:
        sizes = torch.tensor([lengths, learned], dtype=torch.float32, device=device)
        return Spans(of_token, sizes[0].clamp(min=1), sizes[1])

    whole = spans((of_token == len(samples)).long(), [sum(samples)], [sum(learned)])
    return spans(of_token, samples, learned), whole


def balance_scores(logits: Tensor, moe: Moe) -> Tensor:
    """What an expert's share of a token would be if all took part, [T, E], rows adding up to 1.

    Softmax whether it is taken before or after the choice; sigmoids are divided by their sum (arXiv 2412.19437).
    """
    if moe.score == "sigmoid":
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
    return logits.softmax(-1)


def aux_loss(scores: Tensor, chosen: Tensor, spans: Spans, group: dist.ProcessGroup | None = None) -> Tensor:
    """Sum over spans of ``n * E * sum_i(f_i * P_i)``; 1 per label where the load is even (arXiv 2101.03961).

    ``f_i`` is the share of a span's choices that fell on expert i, ``P_i`` the mean of its scores.

    Args:
        scores: float32 [T, E].
        chosen: int64 [T, K].
        spans: of these tokens.
        group: ranks that have other tokens of the same spans. The choices are counted over all of them, and each
            gets the part of the loss that its own scores have in it.
    """
    experts, top_k = scores.size(1), chosen.size(1)
    cells = (spans.of_token[:, None] * experts + chosen).flatten()
    counts = count(cells, (spans.number + 1) * experts).view(-1, experts)[:-1]
    if group is not None and group.size() > 1:
        dist.all_reduce(counts, group=group)
    sums = scores.new_zeros(spans.number + 1, experts).index_add(0, spans.of_token, scores)[:-1]
    return ((counts * sums).sum(1) * (experts / top_k * spans.learned / spans.lengths.square())).sum()


def z_loss(logits: Tensor, spans: Spans) -> Tensor:
    """Sum over spans of ``n`` times the mean of ``logsumexp(logits)^2`` (arXiv 2202.08906); ``logits`` [T, E]."""
    weights = torch.cat([spans.learned / spans.lengths, spans.learned.new_zeros(1)])
    return (logits.logsumexp(-1).square() * weights[spans.of_token]).sum()


def updated_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """Experts with less than the mean load gain ``rate``, those with more lose it (arXiv 2408.15664); both [E]."""
    return bias + rate * (counts.mean() - counts).sign()


class Tally:
    """What a router saw since the step began, on this rank."""

    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.sums: Tensor | None = None
        """float64 [E + 3]: tokens that chose each expert, and the losses in the order of :data:`ROUTER_LOSSES`."""

    def add(self, chosen: Tensor, line: Spans, losses: dict[str, Tensor]) -> None:
        """A micro batch: int64 [T, K], as one span, and what the losses are over it."""
        if self.sums is None:
            self.sums = torch.zeros(self.num_experts + len(ROUTER_LOSSES), dtype=torch.float64, device=chosen.device)
        real = torch.where(line.of_token[:, None] == 0, chosen, self.num_experts)
        self.sums[: self.num_experts] += count(real.flatten(), self.num_experts + 1)[:-1]
        for name, loss in losses.items():
            self.sums[self.num_experts + ROUTER_LOSSES.index(name)] += loss.detach()


@dataclass(frozen=True, slots=True)
class Load:
    """How evenly the tokens of a step were spread over experts, and what imbalance cost; the same on every rank."""

    max_over_mean: float
    """Tokens of the busiest expert over the mean, in the layer where that is most; 1 is even."""
    losses: dict[str, float]
    """Each loss in use, without its coefficient: the mean over the layers with experts."""

    def figures(self) -> dict[str, float]:
        """All by name."""
        return {"load_max_over_mean": self.max_over_mean, **self.losses}


def take_stock(
    tallies: Iterable[tuple[int, Tally]], *, num_layers: int, num_experts: int, num_tokens: int, losses: Iterable[str]
) -> tuple[Load, Tensor]:
    """Add the ranks' tallies up and begin anew; every rank calls it.

    Args:
        tallies: of this rank's routers, by the number of their layer.
        num_layers: of the whole model.
        num_experts: of a layer.
        num_tokens: labels learned in the step.
        losses: those in use.

    Returns:
        The load, and the tokens of each expert, float64 [num_layers, E] (zero for layers without experts).
    """
    table = torch.zeros(
        num_layers, num_experts + len(ROUTER_LOSSES), dtype=torch.float64, device=torch.cuda.current_device()
    )
    for layer, tally in tallies:
        if tally.sums is not None:
            table[layer] += tally.sums
            tally.sums = None
    dist.all_reduce(table)
    counts = table[:, :num_experts]
    means = counts.mean(1)
    used = means > 0
    ratios = torch.where(used, counts.amax(1) / means.clamp(min=1), 0.0)
    per_label = table[:, num_experts:].sum(0) / (used.sum().clamp(min=1) * max(1, num_tokens))
    worst, *found = torch.cat([ratios.max()[None], per_label]).tolist()
    values = dict(zip(ROUTER_LOSSES, found, strict=True))
    return Load(worst, {name: values[name] for name in losses}), counts
