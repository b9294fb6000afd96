"""Which experts a token visits and what each of them weighs, as the families decide it."""

from __future__ import annotations

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


def _best_groups(merits: Tensor, moe: Moe) -> Tensor:
    """``merits`` [T, E], with minus infinity for the experts of all but the best groups."""
    groups = merits.unflatten(-1, (moe.num_groups, -1))
    of_group = groups.amax(-1) if moe.group_score == "max" else groups.topk(2, dim=-1).values.sum(-1)
    best = of_group.topk(moe.group_top_k, dim=-1).indices
    shut = torch.ones_like(of_group, dtype=torch.bool).scatter(-1, best, False)
    return groups.masked_fill(shut[..., None], -torch.inf).flatten(-2)
