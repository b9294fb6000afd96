"""Router: scores, auxiliary losses and load statistics."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from isthmus.config.schema.moe import MoeConfig
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.moe.load_balancing import RouterStats, aux_loss, balance_scores, token_groups, z_loss
from isthmus.engine.moe.routing import route, within_capacity
from isthmus.families.architecture import Moe


class TopKRouter(MegatronModule):
    def __init__(self, config: TransformerConfig, moe: Moe, settings: MoeConfig, groups: Any) -> None:
        super().__init__(config)
        self.moe, self.settings, self.groups = moe, settings, groups
        self.stats = RouterStats(moe.num_experts)
        dtype = torch.float32 if moe.router_float32 else config.params_dtype
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(moe.num_experts, dtype=dtype)) if moe.router_bias else None
        for parameter in self.parameters():
            # finalize_model_grads reads it: each rank has a part of the sequence.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.expert_bias: nn.Parameter | None = None
        if moe.expert_bias:
            self.expert_bias = nn.Parameter(torch.zeros(moe.num_experts), requires_grad=False)

    def forward(self, hidden: Tensor, batch: PackedBatch | None = None) -> tuple[Tensor, Tensor]:
        """Return router weights float32 [T, K] and experts int64 [T, K]; ``num_experts`` is a dropped choice.

        In training also update the statistics and attach the auxiliary losses. ``batch`` is None only outside training.
        """
        bias = None if self.bias is None else self.bias.float()
        logits = F.linear(hidden.float(), self.weight.float(), bias)
        weights, chosen = route(logits, self.expert_bias, self.moe)
        # Activation recomputation runs first without gradients; that pass is not counted.
        if self.training and torch.is_grad_enabled() and batch is not None:
            weights = self._with_losses(weights, logits, chosen, batch)
        if self.settings.capacity_factor is not None:
            chosen = within_capacity(weights, chosen, self.moe.num_experts, self.settings.capacity_factor)
        return weights, chosen

    def _with_losses(self, weights: Tensor, logits: Tensor, chosen: Tensor, batch: PackedBatch) -> Tensor:
        """``weights``, whose backward pass adds the auxiliary losses."""
        losses: dict[str, Tensor] = {}
        sharded, tp = self.config.sequence_parallel, self.groups.tp
        samples, whole = token_groups(batch, *((tp.rank(), tp.size()) if sharded else (0, 1)), device=logits.device)
        if self.settings.losses:
            scores, ranks = balance_scores(logits, self.moe), self.groups.tp_cp if sharded else self.groups.cp
            compute = {
                "aux_loss": lambda: aux_loss(scores, chosen, whole, ranks),
                "seq_aux_loss": lambda: aux_loss(scores, chosen, samples, ranks),
                "z_loss": lambda: z_loss(logits, samples),
            }
            losses = {name: compute[name]() for name in self.settings.losses}
        if sharded or tp.rank() == 0:  # else another rank counts the same tokens
            self.stats.add(chosen, whole, losses)
        if not losses:
            return weights
        total = torch.stack([getattr(self.settings, name) * loss for name, loss in losses.items()]).sum()
        return MoEAuxLossAutoScaler.apply(weights, total)  # type: ignore[no-any-return]
