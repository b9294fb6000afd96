"""Mixture-of-experts blocks with Megatron-Core's parameter names.

Megatron-Core's layer needs TransformerEngine for the router (``te_general_gemm``) and has fewer routing methods.
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
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.moe.experts import GroupedExperts
from isthmus.engine.moe.router import TopKRouter
from isthmus.engine.moe.token_dispatcher import dispatcher
from isthmus.families.architecture import Moe


class MoeBlock(MegatronModule):
    def __init__(self, config: TransformerConfig, submodules: MLPSubmodules, *, moe: Moe, settings: MoeConfig) -> None:
        super().__init__(config)
        groups = get_default_pg_collection()
        self.router = TopKRouter(config, moe, settings, groups)
        expert_config = copy(config)
        expert_config.add_bias_linear = moe.expert_mlp_bias
        own_copies = groups.ep.size() > 1 or groups.expt_tp.size() != groups.tp.size()
        self.experts = GroupedExperts(
            moe.num_experts // groups.ep.size(), expert_config, submodules, groups, own_copies=own_copies
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
        """Activation recomputation of this block."""
        self.batch: PackedBatch | None = None
        """Current micro batch, set by :func:`pass_batch_to_experts`."""

    def set_layer_number(self, layer_number: int) -> None:
        """Megatron-Core passes the model-wide layer number, from 1."""
        self.layer = layer_number - 1

    def forward(self, hidden_states: Tensor, **_unused: Any) -> tuple[Tensor, None]:
        """``hidden_states`` and the result are [T, 1, H], or [T / tp, 1, H] under sequence parallelism."""
        batch = self.batch  # by the backward pass the layer may have another one

        def run(hidden_states: Tensor) -> Tensor:
            hidden = hidden_states[:, 0]
            weights, chosen = self.router(hidden, batch)
            out: Tensor = self.dispatch(hidden, weights, chosen, self.experts)[:, None]
            return out if self.shared_experts is None else out + self.shared_experts(hidden_states)

        if self.recomputed and self.training:
            return tensor_parallel.checkpoint(run, False, hidden_states), None
        return run(hidden_states), None


def pass_batch_to_experts(layer: Any, _args: Any, kwargs: dict[str, Any]) -> None:
    """Forward pre-hook: Megatron-Core's layer does not pass the packed batch to its feed-forward block."""
    layer.mlp.batch = kwargs["packed_seq_params"]
