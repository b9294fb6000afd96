"""Feed-forward blocks: dense, and mixture of experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_isthmus import IsthmusConfig


def clamped_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Activation of gpt-oss."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


class IsthmusMlp(nn.Module):
    """A feed-forward block, or one expert."""

    def __init__(self, config: IsthmusConfig, width: int, *, bias: bool) -> None:
        super().__init__()
        self.act = config.hidden_act
        self.gate_proj = nn.Linear(config.hidden_size, width, bias=bias) if config.gated_mlp else None
        self.up_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] -> [..., H]."""
        up = self.up_proj(x)
        if self.gate_proj is None:
            return self.down_proj(ACTIVATIONS[self.act](up))
        gate = self.gate_proj(x)
        return self.down_proj(
            clamped_swiglu(gate, up) if self.act == "clamped_swiglu" else ACTIVATIONS[self.act](gate) * up
        )


class Router(nn.Module):
    """Selects the experts of each token and computes their weights in float32."""

    def __init__(self, config: IsthmusConfig) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.bias = nn.Parameter(torch.zeros(config.num_experts)) if config.router_bias else None
        self.e_score_correction_bias: Tensor
        if config.router_expert_bias:
            self.register_buffer("e_score_correction_bias", torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``x`` [T, H] -> weights, float32 [T, K], and expert indices, int64 [T, K]."""
        config = self.config
        logits = F.linear(x.float(), self.weight.float(), None if self.bias is None else self.bias.float())
        if config.scoring_func == "softmax_of_chosen":
            best, indices = logits.topk(config.num_experts_per_tok, dim=-1)
            return best.softmax(-1) * config.routed_scaling_factor, indices
        scores = logits.softmax(-1) if config.scoring_func == "softmax" else logits.sigmoid()
        choice_scores = scores + self.e_score_correction_bias.float() if config.router_expert_bias else scores
        if config.n_group > 1:
            choice_scores = self._mask_groups(choice_scores)
        indices = choice_scores.topk(config.num_experts_per_tok, dim=-1).indices
        weights = scores.gather(-1, indices)
        if config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=config.norm_topk_min)
        return weights * config.routed_scaling_factor, indices

    def _mask_groups(self, choice_scores: Tensor) -> Tensor:
        groups = choice_scores.unflatten(-1, (self.config.n_group, -1))
        top2 = groups.topk(2, dim=-1).values.sum(-1) if self.config.group_score == "top2" else None
        group_scores = groups.amax(-1) if top2 is None else top2
        best_groups = group_scores.topk(self.config.topk_group, dim=-1).indices
        masked = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, best_groups, False)
        return groups.masked_fill(masked[..., None], -torch.inf).flatten(-2)


class MixtureOfExperts(nn.Module):
    """Routed experts without token dropping, and optional shared experts."""

    def __init__(self, config: IsthmusConfig) -> None:
        super().__init__()
        width, shared = config.moe_intermediate_size, config.shared_expert_intermediate_size
        self.gate = Router(config)
        experts = (IsthmusMlp(config, width, bias=config.expert_mlp_bias) for _ in range(config.num_experts))
        self.experts = nn.ModuleList(experts)
        self.shared_experts = IsthmusMlp(config, shared, bias=False) if shared else None
        weighted = shared and config.shared_expert_gate
        self.shared_expert_gate = nn.Linear(config.hidden_size, 1, bias=False) if weighted else None
        self.output_bias = nn.Parameter(torch.zeros(config.hidden_size)) if config.moe_output_bias else None

    def forward(self, x: Tensor) -> Tensor:
        """[B, S, H] -> [B, S, H]."""
        tokens = x.flatten(0, 1)
        weights, indices = self.gate(tokens)
        out = torch.zeros_like(tokens)
        for expert in indices.unique().tolist():
            rows, slots = (indices == expert).nonzero(as_tuple=True)
            weight = weights[rows, slots, None].to(tokens.dtype)
            out = out.index_add(0, rows, self.experts[expert](tokens[rows]) * weight)
        if self.shared_experts is not None:
            shared = self.shared_experts(tokens)
            if self.shared_expert_gate is not None:
                shared = shared * self.shared_expert_gate(tokens).sigmoid()
            out = out + shared
        if self.output_bias is not None:
            out = out + self.output_bias
        return out.view_as(x)
