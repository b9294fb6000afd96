"""The router of a layer with experts: its scores, what it is charged for imbalance, what it has seen."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from isthmus.config.schema.moe import MoeConfig
from isthmus.engine.layers.attention import Segments
from isthmus.engine.moe.load_balancing import Tally, aux_loss, balance_scores, spans_of, z_loss
from isthmus.engine.moe.routing import route, within_capacity
from isthmus.families.architecture import Moe


class Router(MegatronModule):
    """Scores tokens against experts, in float32 whatever the model's type is."""

    def __init__(self, config: TransformerConfig, moe: Moe, settings: MoeConfig, groups: Any) -> None:
        """Memory for the weights [E, H]; ``expert_bias`` [E] has no gradient."""
        super().__init__(config)
        self.moe, self.settings, self.groups = moe, settings, groups
        self.tally = Tally(moe.num_experts)
        dtype = torch.float32 if moe.router_float32 else config.params_dtype
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(moe.num_experts, dtype=dtype)) if moe.router_bias else None
        for parameter in self.parameters():
            # finalize_model_grads reads this mark: each rank routed only its part of the sequence.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.expert_bias: nn.Parameter | None = None
        if moe.expert_bias:
            self.expert_bias = nn.Parameter(torch.zeros(moe.num_experts), requires_grad=False)

    def forward(self, hidden: Tensor, segments: Segments | None = None) -> tuple[Tensor, Tensor]:
        """Choose, and in training count and charge.

        Args:
            hidden: [T, H], this rank's part of the line.
            segments: of the whole line; None only where nothing is trained.

        Returns:
            Weights float32 [T, K] and numbers int64 [T, K] of the chosen experts; ``num_experts`` for a choice that
            there is no room for.
        """
        bias = None if self.bias is None else self.bias.float()
        logits = F.linear(hidden.float(), self.weight.float(), bias)
        weights, chosen = route(logits, self.expert_bias, self.moe)
        # What is computed again in the backward pass runs without gradients first: it is counted once.
        if self.training and torch.is_grad_enabled() and segments is not None:
            weights = self._charged(weights, logits, chosen, segments)
        if self.settings.capacity_factor is not None:
            chosen = within_capacity(weights, chosen, self.moe.num_experts, self.settings.capacity_factor)
        return weights, chosen

    def _charged(self, weights: Tensor, logits: Tensor, chosen: Tensor, segments: Segments) -> Tensor:
        """``weights``, whose gradient brings that of the losses along."""
        losses: dict[str, Tensor] = {}
        cut, tp = self.config.sequence_parallel, self.groups.tp
        samples, line = spans_of(segments, *((tp.rank(), tp.size()) if cut else (0, 1)), device=logits.device)
        if self.settings.losses:
            scores, group = balance_scores(logits, self.moe), self.groups.tp_cp if cut else self.groups.cp
            compute = {
                "aux_loss": lambda: aux_loss(scores, chosen, line, group),
                "seq_aux_loss": lambda: aux_loss(scores, chosen, samples, group),
                "z_loss": lambda: z_loss(logits, samples),
            }
            losses = {name: compute[name]() for name in self.settings.losses}
        if cut or tp.rank() == 0:  # else another rank has seen the same tokens
            self.tally.add(chosen, line, losses)
        if not losses:
            return weights
        charge = torch.stack([getattr(self.settings, name) * loss for name, loss in losses.items()]).sum()
        return MoEAuxLossAutoScaler.apply(weights, charge)  # type: ignore[no-any-return]
