"""Feed-forward blocks that are mixtures of experts.

Parameters have Megatron-Core's names; its own layer needs TransformerEngine for the router (``te_general_gemm``) and
knows fewer ways to choose experts than the families do.
"""

from __future__ import annotations

from copy import copy
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from isthmus.config.schema.moe import MoeConfig
from isthmus.engine.layers.attention import Segments
from isthmus.engine.moe.experts import Experts
from isthmus.engine.moe.router import Router
from isthmus.engine.moe.token_dispatcher import dispatcher
from isthmus.families.architecture import Moe


class MoeBlock(MegatronModule):
    """Router, experts and shared experts in the place of a feed-forward block."""

    def __init__(self, config: TransformerConfig, submodules: MLPSubmodules, *, moe: Moe, settings: MoeConfig) -> None:
        super().__init__(config)
        groups = get_default_pg_collection()
        self.router = Router(config, moe, settings, groups)
        of_expert = copy(config)
        of_expert.add_bias_linear = moe.expert_mlp_bias
        own_copies = groups.ep.size() > 1 or groups.expt_tp.size() != groups.tp.size()
        self.experts = Experts(
            moe.num_experts // groups.ep.size(), of_expert, submodules, groups, own_copies=own_copies
        )
        self.dispatch = dispatcher(
            settings.dispatcher,
            groups,
            num_experts=moe.num_experts,
            sequence_parallel=config.sequence_parallel,
            dropless=settings.capacity_factor is None,
        )
        self.shared_experts: SharedExpertMLP | None = None
        if moe.shared_ffn_hidden_size:
            self.shared_experts = SharedExpertMLP(config, submodules, moe.shared_gate, groups)
        self.layer = 0
        self.recomputed = False
        """Whether what it makes is computed again in the backward pass instead of being kept."""
        self.segments: Segments | None = None
        """Of the line that the layer is at, see :func:`tell_line`."""

    def set_layer_number(self, layer_number: int) -> None:
        """Megatron-Core says which layer this is, counted from 1 over the whole model."""
        self.layer = layer_number - 1

    def forward(self, hidden_states: Tensor, **_unused: Any) -> tuple[Tensor, None]:
        """``hidden_states`` [T, 1, H], or [T / tp, 1, H] under sequence parallelism; so is what comes back."""
        segments = self.segments  # of now: by the backward pass the layer may be at another line

        def made(hidden_states: Tensor) -> Tensor:
            hidden = hidden_states[:, 0]
            weights, chosen = self.router(hidden, segments)
            out: Tensor = self.dispatch(hidden, weights, chosen, self.experts)[:, None]
            return out if self.shared_experts is None else out + self.shared_experts(hidden_states)

        if self.recomputed and self.training:
            return tensor_parallel.checkpoint(made, False, hidden_states), None
        return made(hidden_states), None


def tell_line(layer: Any, _args: Any, kwargs: dict[str, Any]) -> None:
    """Before a layer runs, its experts learn what samples the line has; Megatron-Core's layer does not pass it on."""
    layer.mlp.segments = kwargs["packed_seq_params"]
