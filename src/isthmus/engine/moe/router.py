"""Top-k routing of tokens to experts: scores, expert capacity, auxiliary losses and load statistics."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from isthmus.config.schema.moe import MoeConfig
from isthmus.data.batching.packed_batch import PackedBatch, TokenGroups
from isthmus.engine.compiled import compiled_on_gpu, compiles
from isthmus.engine.layers.fused_function import fused
from isthmus.engine.layers.norm import rms_norm_of_float32
from isthmus.engine.moe.expert_draws import ExpertDraws, draw_experts
from isthmus.engine.moe.load_balancing import RouterStats, aux_loss, balance_scores, z_loss
from isthmus.engine.moe.routed_tokens import expert_capacity
from isthmus.engine.moe.router_logits import router_logits
from isthmus.engine.moe.router_replay import replayed
from isthmus.families.blocks.feed_forward import Experts


class TopKRouter(MegatronModule):
    fsdp_unit = "float32"
    """It computes in float32 in any precision."""

    def __init__(
        self, config: TransformerConfig, moe: Experts, settings: MoeConfig, groups: Any, layer: int = 0
    ) -> None:
        super().__init__(config)
        self.moe = moe
        self.settings = settings
        self.groups = groups
        self.layer = layer
        self.stats = RouterStats(moe.num_experts)
        dtype = torch.float32 if moe.router_float32 else config.params_dtype
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(moe.num_experts, dtype=dtype)) if moe.router_bias else None
        self.scale = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype)) if moe.router_norm else None
        self.per_expert_scale = nn.Parameter(torch.empty(moe.num_experts, dtype=dtype)) if moe.expert_gains else None
        for parameter in self.parameters():
            # finalize_model_grads reads it: each rank has a part of the sequence.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.expert_bias: nn.Parameter | None = None
        if moe.expert_bias:
            self.expert_bias = nn.Parameter(torch.zeros(moe.num_experts), requires_grad=False)

    def forward(self, hidden: Tensor, batch: PackedBatch | None = None) -> tuple[Tensor, Tensor]:
        """Return router weights float32 [T, K] and experts int64 [T, K]; ``num_experts`` is a dropped choice.

        In training also update the statistics and attach the auxiliary losses, if ``batch`` has token groups.
        """
        draws = None
        if self.training and self.moe.score == "sparsemixer":
            if batch is None:
                raise ValueError(
                    "a model that draws its experts in training needs the batch, got None; call model.eval()"
                )
            draws = draw_experts(hidden, batch, self.moe, self.layer)
        if self.scale is not None:
            hidden = rms_norm_of_float32(hidden.float(), self.scale, self.config.layernorm_epsilon)
        logits = router_logits(hidden, self.weight)
        if self.bias is not None:
            logits = logits + self.bias.float()
        if self.scale is not None:
            logits = logits * self.config.hidden_size**-0.5
        weights, choice = route(logits, self.expert_bias, self.moe, draws)
        chosen = replayed(batch, self.layer, choice)
        if chosen is not choice:
            weights = weights_of(chosen, logits, self.moe)
        if self.per_expert_scale is not None:
            weights = weights * self.per_expert_scale.float()[chosen]
        # Activation recomputation runs first without gradients; that pass is not counted.
        if self.training and torch.is_grad_enabled() and batch is not None and batch.token_groups is not None:
            weights = self._with_losses(weights, logits, chosen, choice, *batch.token_groups)
        if self.settings.capacity_factor is not None:
            chosen = within_capacity(weights, chosen, self.moe.num_experts, self.settings.capacity_factor)
        return weights, chosen

    def _with_losses(
        self,
        weights: Tensor,
        logits: Tensor,
        chosen: Tensor,
        choice: Tensor,
        samples: TokenGroups,
        all_tokens: TokenGroups,
    ) -> Tensor:
        """``weights``, whose backward pass adds the auxiliary losses; ``choice`` is that of the router."""
        losses: dict[str, Tensor] = {}
        sharded, tp = self.config.sequence_parallel, self.groups.tp
        if self.settings.losses:
            scores, ranks = balance_scores(logits, self.moe), self.groups.tp_cp if sharded else self.groups.cp
            compute = {
                "aux_loss": lambda: aux_loss(scores, chosen, all_tokens, ranks),
                "seq_aux_loss": lambda: aux_loss(scores, chosen, samples, ranks),
                "z_loss": lambda: z_loss(logits, samples),
            }
            losses = {name: compute[name]() for name in self.settings.losses}
        if sharded or tp.rank() == 0:  # else another rank counts the same tokens
            self.stats.add(chosen, all_tokens, losses, None if chosen is choice else choice)
        if not losses:
            return weights
        total = torch.stack([getattr(self.settings, name) * loss for name, loss in losses.items()]).sum()
        return MoEAuxLossAutoScaler.apply(weights, total)


def route(
    logits: Tensor, expert_bias: Tensor | None, moe: Experts, draws: ExpertDraws | None = None
) -> tuple[Tensor, Tensor]:
    """Choose ``moe.top_k`` experts per token; ``expert_bias`` [E] affects the selection but not the weights.

    ``draws``: noise of ``sparsemixer`` in training, None for the best experts.

    Logits are float32 [T, E]. Returns router weights [T, K] (differentiable) and int64 expert indices [T, K].
    """
    if moe.score == "sparsemixer":
        return _one_after_another(logits, moe, draws)
    if compiles(logits):
        chosen = _choice_region(moe)(logits.detach(), expert_bias)
        return weights_of(chosen, logits, moe), chosen
    if moe.score == "softmax_of_chosen":
        best, chosen = logits.topk(moe.top_k, dim=-1)
        return best.softmax(-1) * moe.scaling_factor, chosen
    scores = _scores(logits, moe)
    chosen = _choice(scores.detach(), expert_bias, moe)
    return _weights(scores, chosen, moe), chosen


def _choice(scores: Tensor, expert_bias: Tensor | None, moe: Experts) -> Tensor:
    selection = scores if expert_bias is None else scores + expert_bias
    return (selection if moe.num_groups == 1 else _best_groups(selection, moe)).topk(moe.top_k, dim=-1).indices


def weights_of(chosen: Tensor, logits: Tensor, moe: Experts) -> Tensor:
    """Router weights [T, K] of given experts, as :func:`route` computes them for those that it chooses."""
    compute = _weights_function(moe)
    return (fused(compute) if compiles(logits) else compute)(logits, chosen)


@functools.cache  # one function for the layers of a model, whose regions belong to it
def _weights_function(moe: Experts) -> Callable[[Tensor, Tensor], Tensor]:
    def router_weights(logits: Tensor, chosen: Tensor) -> Tensor:
        if moe.score == "softmax_of_chosen":
            return logits.gather(-1, chosen).softmax(-1) * moe.scaling_factor
        return _weights(_scores(logits, moe), chosen, moe)

    return router_weights


@functools.cache
def _choice_region(moe: Experts) -> Callable[[Tensor, Tensor | None], Tensor]:
    @compiled_on_gpu
    def choice(logits: Tensor, expert_bias: Tensor | None) -> Tensor:
        scores = logits if moe.score == "softmax_of_chosen" else _scores(logits, moe)
        return _choice(scores, None if moe.score == "softmax_of_chosen" else expert_bias, moe)

    return choice


def _scores(logits: Tensor, moe: Experts) -> Tensor:
    return logits.softmax(-1) if moe.score == "softmax" else logits.sigmoid()


def _weights(scores: Tensor, chosen: Tensor, moe: Experts) -> Tensor:
    weights = scores.gather(-1, chosen)
    if moe.normalize:
        total = weights.sum(-1, keepdim=True).clamp(min=moe.normalize_min)
        weights = weights / (total + moe.normalize_offset if moe.normalize_offset else total)
    return weights * moe.scaling_factor


def _one_after_another(logits: Tensor, moe: Experts, draws: ExpertDraws | None) -> tuple[Tensor, Tensor]:
    """The selection of ``sparsemixer``; it is not one of :meth:`torch.topk` because each choice has its own softmax."""
    weights, chosen, remaining = [], [], logits
    for number in range(moe.top_k):
        best, index = remaining.detach().max(dim=-1, keepdim=True)
        distance = (best - logits.detach()) / logits.detach().abs().clamp(min=best)
        near = remaining.masked_fill(distance > moe.score_tolerance, -torch.inf)
        if draws is not None:
            index = draws.chosen(near.detach(), number)
        weight = near.softmax(-1).gather(-1, index)
        weights.append(weight if draws is None else draws.scaled(weight, near.detach(), index, number))
        chosen.append(index)
        remaining = remaining.scatter(-1, index, -torch.inf)
    return torch.cat(weights, -1) * moe.scaling_factor, torch.cat(chosen, -1)


def within_capacity(weights: Tensor, chosen: Tensor, num_experts: int, factor: float) -> Tensor:
    """Drop tokens beyond each expert's capacity, the lowest router weights first (GShard, arXiv 2006.16668).

    Weights are not renormalized. Returns
    ``chosen`` with ``num_experts`` for each dropped choice.
    """
    capacity = expert_capacity(chosen.numel(), num_experts, factor)
    flat = chosen.flatten()
    by_weight = weights.detach().flatten().argsort(descending=True, stable=True)
    order = by_weight[flat[by_weight].argsort(stable=True)]  # by expert, and by weight within it
    experts = flat[order]
    starts = torch.searchsorted(experts, torch.arange(num_experts, device=flat.device))
    rank = torch.arange(flat.numel(), device=flat.device) - starts[experts]
    dropped = torch.empty_like(flat, dtype=torch.bool).scatter_(0, order, rank >= capacity)
    return chosen.masked_fill(dropped.view_as(chosen), num_experts)


def _best_groups(selection: Tensor, moe: Experts) -> Tensor:
    """Scores ``selection`` [T, E], with minus infinity for the experts outside the best groups."""
    groups = selection.unflatten(-1, (moe.num_groups, -1))
    group_scores = groups.amax(-1) if moe.group_score == "max" else groups.topk(2, dim=-1).values.sum(-1)
    best = group_scores.topk(moe.group_top_k, dim=-1).indices
    masked = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, best, False)
    return groups.masked_fill(masked[..., None], -torch.inf).flatten(-2)
