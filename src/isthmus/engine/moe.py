"""Feed-forward blocks that are mixtures of experts; no token is dropped.

Every rank of a tensor-parallel group sees all tokens of the line and holds a slice of each expert, so what its experts
make of a token is a part of a sum over the ranks. Parameters have Megatron-Core's names; its own layer needs
TransformerEngine for the router (``te_general_gemm``) and knows fewer ways to choose experts than the families do.
"""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from isthmus.engine.routing import route
from isthmus.families.architecture import Moe


class Router(MegatronModule):
    """Scores tokens against experts, in float32 whatever the model's type is."""

    def __init__(self, config: TransformerConfig, moe: Moe) -> None:
        """Memory for the weights [E, H]; ``expert_bias`` [E] is a constant of training."""
        super().__init__(config)
        self.moe = moe
        dtype = torch.float32 if moe.router_float32 else config.params_dtype
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(moe.num_experts, dtype=dtype)) if moe.router_bias else None
        for parameter in self.parameters():
            # finalize_model_grads reads this mark: each rank routed only its part of the sequence.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.expert_bias: nn.Parameter | None = None
        if moe.expert_bias:
            self.expert_bias = nn.Parameter(torch.zeros(moe.num_experts), requires_grad=False)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """``hidden`` [T, H] -> weights float32 [T, K] and numbers int64 [T, K] of the chosen experts."""
        bias = None if self.bias is None else self.bias.float()
        return route(F.linear(hidden.float(), self.weight.float(), bias), self.expert_bias, self.moe)


class Experts(SequentialMLP):
    """This rank's experts, one after the other, each with the tokens that chose it."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for expert in self.local_experts:
            if expert.linear_fc2.bias is not None:
                # Megatron-Core marks it to be summed over tp; here each rank sees all tokens, and all of its gradient.
                expert.linear_fc2.bias.sequence_parallel = False

    def forward(self, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Weigh and add up what the experts of this rank make of their tokens.

        Args:
            hidden: [T, H].
            weights: float32 [T, K].
            chosen: int64 [T, K], numbers of experts in the whole layer.

        Returns:
            This rank's part of the sum, [T, H].
        """
        first = self.ep_group.rank() * self.num_local_experts
        visits = chosen.flatten() - first
        order = visits.argsort(stable=True)
        counts = torch.bincount(visits.clamp(-1, self.num_local_experts) + 1, minlength=self.num_local_experts + 2)
        before, *mine, _ = counts.tolist()
        order = order[before : before + sum(mine)]
        tokens = order // chosen.size(1)
        parts = zip(
            self.local_experts,
            hidden.index_select(0, tokens).split(mine),
            weights.flatten().index_select(0, order).to(hidden.dtype).split(mine),
            strict=True,
        )
        # An expert without tokens runs all the same: its gradient is zero, and is there.
        made = torch.cat([self._made(expert, part, share) for expert, part, share in parts])
        return torch.zeros_like(hidden).index_add(0, tokens, made)

    def _made(self, expert: Any, hidden: Tensor, share: Tensor) -> Tensor:
        wide, bias = expert.linear_fc1(hidden)
        inner = expert.activation_func(wide if bias is None else wide + bias) * share[:, None]
        out, bias = expert.linear_fc2(inner)
        if bias is None:
            return out  # type: ignore[no-any-return]
        # The ranks' parts are added up: each adds its share of the bias, and the gradient is that of all of it.
        part_of_bias = bias + bias.detach() * (1 / self.tp_group.size() - 1)
        return torch.addcmul(out, part_of_bias, share[:, None])


class MoeBlock(MegatronModule):
    """Router, experts and shared experts in the place of a feed-forward block."""

    def __init__(self, config: TransformerConfig, submodules: MLPSubmodules, *, moe: Moe) -> None:
        super().__init__(config)
        groups = get_default_pg_collection()
        self.router = Router(config, moe)
        of_expert = copy(config)
        of_expert.add_bias_linear = moe.expert_mlp_bias
        self.experts = Experts(moe.num_experts // groups.ep.size(), of_expert, submodules, groups)
        self.shared_experts: SharedExpertMLP | None = None
        if moe.shared_ffn_hidden_size:
            self.shared_experts = SharedExpertMLP(config, submodules, moe.shared_gate, groups)

    def forward(self, hidden_states: Tensor, **_unused: Any) -> tuple[Tensor, None]:
        """``hidden_states`` [T, 1, H], or [T / tp, 1, H] under sequence parallelism; so is what comes back."""
        hidden = hidden_states[:, 0]
        weights, chosen = self.router(hidden)
        if self.config.sequence_parallel:
            # A rank's experts give a part of each gradient: on the way back the parts are added and shared out.
            hidden, weights = (
                gather_from_sequence_parallel_region(each, tensor_parallel_output_grad=True)
                for each in (hidden, weights)
            )
            chosen = gather_from_sequence_parallel_region(chosen)
            out = reduce_scatter_to_sequence_parallel_region(self.experts(hidden, weights, chosen))
        else:
            hidden, weights = (copy_to_tensor_model_parallel_region(each) for each in (hidden, weights))
            out = reduce_from_tensor_model_parallel_region(self.experts(hidden, weights, chosen))
        out = out[:, None]
        if self.shared_experts is not None:
            out = out + self.shared_experts(hidden_states)
        return out, None
