"""Expert load balancing: auxiliary losses, expert bias updates and load statistics.

The mean loss of the batch grows by ``coefficient / N * sum(n * L)`` over groups with ``n`` of the batch's ``N`` loss
tokens and loss ``L``. A group is a micro batch for ``aux_loss`` and a sample for ``seq_aux_loss`` and ``z_loss``, which
therefore do not depend on the micro batch size. Padding is in no group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.config.schema.moe import ROUTER_LOSSES
from isthmus.data.batching.packed_batch import PackedBatch, TokenGroups
from isthmus.engine.compiled import compiled_on_gpu
from isthmus.engine.host_copies import to_device
from isthmus.engine.moe.routed_tokens import count
from isthmus.engine.moe.router_replay import differs
from isthmus.engine.parallel.context_parallel import local_tokens
from isthmus.families.blocks.feed_forward import Experts


def token_groups(batch: PackedBatch, rank: int, ranks: int, device: torch.device) -> tuple[TokenGroups, TokenGroups]:
    """The samples of a batch as groups, and the whole batch as one group.

    Under sequence parallelism each tp ``rank`` of ``ranks`` has an equal part of the batch.
    """
    samples = batch.sample_lengths
    weights = batch.sample_weights[: len(samples)]
    numbers, lengths = torch.arange(len(batch.lengths)), torch.tensor(batch.lengths)
    token_samples = numbers.repeat_interleave(lengths, output_size=sum(batch.lengths))
    token_samples = batch.layer_rows(local_tokens(token_samples, batch.spans))
    token_samples = to_device(token_samples.chunk(ranks)[rank], device)
    sizes = torch.tensor([[*samples, sum(samples)], [*weights, sum(weights)]], dtype=torch.float32)
    sizes = to_device(torch.stack([sizes[0].clamp(min=1), sizes[1]]), device)
    number = len(samples)
    all_tokens = TokenGroups((token_samples == number).long(), sizes[0, number:], sizes[1, number:])
    return TokenGroups(token_samples, sizes[0, :number], sizes[1, :number]), all_tokens


def balance_scores(logits: Tensor, moe: Experts) -> Tensor:
    """Rows of [T, E] that sum to 1: softmax, or normalized sigmoids (arXiv 2412.19437)."""
    if moe.score == "sigmoid":
        scores = logits.sigmoid()
        return scores / scores.sum(-1, keepdim=True).clamp(min=1e-20)
    return logits.softmax(-1)


def aux_loss(scores: Tensor, chosen: Tensor, groups: TokenGroups, ranks: dist.ProcessGroup | None = None) -> Tensor:
    """Sum over groups of ``n * E * sum_i(f_i * P_i)``; 1 per loss token at a uniform load (arXiv 2101.03961).

    ``f_i`` is the fraction of a group's choices that are expert i, ``P_i`` its mean score. ``scores`` are [T, E],
    ``chosen`` [T, K]. ``ranks`` have other tokens of the groups: choices are counted on all ranks, scores on this one.
    """
    experts, top_k = scores.size(1), chosen.size(1)
    cells = (groups.group_ids[:, None] * experts + chosen).flatten()
    counts = count(cells, (groups.number + 1) * experts).view(-1, experts)[:-1]
    if ranks is not None and ranks.size() > 1:
        dist.all_reduce(counts, group=ranks)
    sums = scores.new_zeros(groups.number + 1, experts).index_add(0, groups.group_ids, scores)[:-1]
    return ((counts * sums).sum(1) * (experts / top_k * groups.weights / groups.lengths.square())).sum()


def z_loss(logits: Tensor, groups: TokenGroups) -> Tensor:
    """Sum over groups of ``n`` times the mean of ``logsumexp(logits)^2`` (arXiv 2202.08906); ``logits`` [T, E]."""
    weights = torch.cat([groups.weights / groups.lengths, groups.weights.new_zeros(1)])
    return (logits.logsumexp(-1).square() * weights[groups.group_ids]).sum()


def updated_bias(bias: Tensor, counts: Tensor, rate: float) -> Tensor:
    """Add ``rate`` for experts below the mean load and subtract it above (arXiv 2408.15664); both [E]."""
    return bias + rate * (counts.mean() - counts).sign()


@compiled_on_gpu
def add_counts(chosen: Tensor, group_ids: Tensor, sums: Tensor, num_experts: int) -> None:
    """Add the tokens of each expert to the first of ``sums``; ``chosen`` [T, K] counts where ``group_ids`` [T] is 0."""
    real = torch.where(group_ids[:, None] == 0, chosen, num_experts)
    sums[:num_experts] += count(real.flatten(), num_experts + 1)[:-1]


_SUMS = (*ROUTER_LOSSES, "replayed", "replay_differences")
"""Sums of a router: losses, tokens with the experts of a rollout, and those for which it would choose others."""


class RouterStats:
    def __init__(self, num_experts: int) -> None:
        self.num_experts = num_experts
        self.sums: Tensor | None = None
        """float64 [E + 5]: tokens of each expert, then :data:`_SUMS`."""

    def add(
        self, chosen: Tensor, all_tokens: TokenGroups, losses: dict[str, Tensor], choice: Tensor | None = None
    ) -> None:
        """Add a micro batch; ``chosen`` is int64 [T, K], ``choice`` that of the router if ``chosen`` is replayed."""
        if self.sums is None:
            self.sums = torch.zeros(self.num_experts + len(_SUMS), dtype=torch.float64, device=chosen.device)
        add_counts(chosen, all_tokens.group_ids, self.sums, self.num_experts)
        sums = {name: loss.detach() for name, loss in losses.items()}
        if choice is not None:
            is_real = all_tokens.group_ids == 0
            sums |= {"replayed": is_real.sum(), "replay_differences": (is_real & differs(chosen, choice)).sum()}
        for name, value in sums.items():
            self.sums[self.num_experts + _SUMS.index(name)] += value


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    max_over_mean: float
    """Tokens of the busiest expert over the mean, the largest over all layers; 1 is uniform."""
    losses: dict[str, float]
    """Losses without their coefficients: means over the layers with experts."""
    replay_differences: float | None = None
    """Share of the replayed choices of tokens and layers for which the router would choose other experts; None without
    router replay."""

    @classmethod
    def of(cls, stats: Sequence[float], losses: Iterable[str]) -> ExpertLoad:
        """From the values of :func:`load_stats`, with these losses."""
        values = dict(zip(_SUMS, stats[1:], strict=True))
        differing = values["replay_differences"] / values["replayed"] if values["replayed"] else None
        return cls(stats[0], {name: values[name] for name in losses}, differing)

    def metrics(self) -> dict[str, float]:
        replay = {} if self.replay_differences is None else {"replay_differences": self.replay_differences}
        return {"load_max_over_mean": self.max_over_mean, **self.losses, **replay}


def router_sums(
    stats: Iterable[tuple[int, RouterStats]], *, num_layers: int, num_experts: int | None, device: torch.device
) -> Tensor:
    """Take the statistics of this rank, which are reset; ``stats`` has model-wide layer numbers.

    Returns float64 [num_layers, E + 5], or [0, 5] for a model without experts.
    """
    rows, experts = (0, 0) if num_experts is None else (num_layers, num_experts)
    table = torch.zeros(rows, experts + len(_SUMS), dtype=torch.float64, device=device)
    for layer, layer_stats in stats:
        if layer_stats.sums is not None:
            table[layer] += layer_stats.sums
            layer_stats.sums = None
    return table


def load_stats(table: Tensor, count: Tensor) -> Tensor:
    """What :meth:`ExpertLoad.of` reads, float64 [1 + 5]; empty for a model without experts.

    ``table`` is the sum of :func:`router_sums` over all ranks, ``count`` the denominator of the step's mean loss.
    """
    if not len(table):
        return table.flatten()
    counts, sums = table[:, : -len(_SUMS)], table[:, -len(_SUMS) :].sum(0)
    losses, replay = sums[: len(ROUTER_LOSSES)], sums[len(ROUTER_LOSSES) :]
    means = counts.mean(1)
    used = means > 0
    ratios = torch.where(used, counts.amax(1) / means, 0.0)
    per_token = losses / (used.sum().clamp(min=1) * count.clamp(min=1))
    return torch.cat([ratios.max()[None], per_token, replay])
