"""Top-k routing of tokens to experts, and expert capacity."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from isthmus.families.architecture import Moe


def route(logits: Tensor, expert_bias: Tensor | None, moe: Moe) -> tuple[Tensor, Tensor]:
    """Choose ``moe.top_k`` experts per token; ``expert_bias`` [E] affects the selection but not the weights.

    Logits are float32 [T, E]. Returns router weights [T, K] (differentiable) and int64 expert indices [T, K].
    """
    if moe.score == "softmax_of_chosen":
        best, chosen = logits.topk(moe.top_k, dim=-1)
        return best.softmax(-1) * moe.scaling_factor, chosen
    scores = logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()
    selection = scores.detach() if expert_bias is None else scores.detach() + expert_bias
    chosen = (selection if moe.num_groups == 1 else _best_groups(selection, moe)).topk(moe.top_k, dim=-1).indices
    weights = scores.gather(-1, chosen)
    if moe.normalize:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=moe.normalize_min)
    return weights * moe.scaling_factor, chosen


def within_capacity(weights: Tensor, chosen: Tensor, num_experts: int, factor: float) -> Tensor:
    """Drop tokens beyond each expert's capacity, the lowest router weights first (GShard, arXiv 2006.16668).

    The capacity is ``ceil(factor * T * K / E)`` tokens, as in Megatron-Core; weights are not renormalized. Returns
    ``chosen`` with ``num_experts`` for each dropped choice.
    """
    capacity = math.ceil(factor * chosen.numel() / num_experts)
    flat = chosen.flatten()
    by_weight = weights.detach().flatten().argsort(descending=True, stable=True)
    order = by_weight[flat[by_weight].argsort(stable=True)]  # by expert, and by weight within it
    experts = flat[order]
    starts = torch.searchsorted(experts, torch.arange(num_experts, device=flat.device))
    rank = torch.arange(flat.numel(), device=flat.device) - starts[experts]
    dropped = torch.empty_like(flat, dtype=torch.bool).scatter_(0, order, rank >= capacity)
    return chosen.masked_fill(dropped.view_as(chosen), num_experts)


def _best_groups(selection: Tensor, moe: Moe) -> Tensor:
    """Scores ``selection`` [T, E], with minus infinity for the experts outside the best groups."""
    groups = selection.unflatten(-1, (moe.num_groups, -1))
    of_group = groups.amax(-1) if moe.group_score == "max" else groups.topk(2, dim=-1).values.sum(-1)
    best = of_group.topk(moe.group_top_k, dim=-1).indices
    masked = torch.ones_like(of_group, dtype=torch.bool).scatter(-1, best, False)
    return groups.masked_fill(masked[..., None], -torch.inf).flatten(-2)
