"""Which experts a token visits and what each of them weighs, as the families decide it; who has room for it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from isthmus.families.architecture import Moe


def route(logits: Tensor, expert_bias: Tensor | None, moe: Moe) -> tuple[Tensor, Tensor]:
    """Choose ``moe.top_k`` experts for each token.

    Args:
        logits: float32 [T, E].
        expert_bias: float32 [E], added to the scores for the choice and not for the weights; None for none.
        moe: how scores are made, grouped and weighed.

    Returns:
        Weights float32 [T, K], through which the gradient goes, and the numbers of the experts int64 [T, K].
    """
    if moe.score == "softmax_of_chosen":
        best, chosen = logits.topk(moe.top_k, dim=-1)
        return best.softmax(-1) * moe.scaling_factor, chosen
    scores = logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()
    merits = scores.detach() if expert_bias is None else scores.detach() + expert_bias
    chosen = (merits if moe.num_groups == 1 else _best_groups(merits, moe)).topk(moe.top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if moe.normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=moe.normalize_min)
    return weights * moe.scaling_factor, chosen


def within_capacity(weights: Tensor, chosen: Tensor, num_experts: int, factor: float) -> Tensor:
    """The choices that experts have room for: of each expert's, those that weigh most (GShard, arXiv 2006.16668).

    An expert takes ``ceil(factor * T * K / E)`` tokens, as in Megatron-Core. What remains of a token's weights stays as
    it is; a token that nobody takes goes by the experts.

    Args:
        weights: float32 [T, K].
        chosen: int64 [T, K].
        num_experts: E.
        factor: 1 is room for an even share.

    Returns:
        ``chosen`` with ``num_experts`` in place of what is dropped.
    """
    capacity = math.ceil(factor * chosen.numel() / num_experts)
    flat = chosen.flatten()
    by_weight = weights.detach().flatten().argsort(descending=True, stable=True)
    order = by_weight[flat[by_weight].argsort(stable=True)]  # by expert, and by weight within it
    experts = flat[order]
    starts = torch.searchsorted(experts, torch.arange(num_experts, device=flat.device))
    place = torch.arange(flat.numel(), device=flat.device) - starts[experts]
    dropped = torch.empty_like(flat, dtype=torch.bool).scatter_(0, order, place >= capacity)
    return chosen.masked_fill(dropped.view_as(chosen), num_experts)


def _best_groups(merits: Tensor, moe: Moe) -> Tensor:
    """``merits`` [T, E], with minus infinity for the experts of all but the best groups."""
    groups = merits.unflatten(-1, (moe.num_groups, -1))
    of_group = groups.amax(-1) if moe.group_score == "max" else groups.topk(2, dim=-1).values.sum(-1)
    best = of_group.topk(moe.group_top_k, dim=-1).indices
    shut = torch.ones_like(of_group, dtype=torch.bool).scatter(-1, best, False)
    return groups.masked_fill(shut[..., None], -torch.inf).flatten(-2)
