"""Mixture-of-experts blocks with Megatron-Core's parameter names.

Megatron-Core's layer needs TransformerEngine for the router (``te_general_gemm``) and has fewer routing methods.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from copy import copy
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor, nn

from isthmus.config.schema.moe import MoeConfig
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.compiled import compiles
from isthmus.engine.decoder_config import DecoderConfig
from isthmus.engine.layers.activation import Activation
from isthmus.engine.layers.fused_function import fused
from isthmus.engine.layers.recompute import recompute_if
from isthmus.engine.linear.linear import ColumnParallelLinear, ReplicatedLinear, linear_adapters
from isthmus.engine.lora.input_dropout import with_this_batch
from isthmus.engine.moe.grouped_gemm import GemmKernels, GroupedMatmul, GroupSizes, grouped_linear, grouped_matmul
from isthmus.engine.moe.router import TopKRouter
from isthmus.engine.moe.token_dispatcher import dispatcher
from isthmus.engine.parallel.ddp import mark_expert_parameter
from isthmus.families.blocks.feed_forward import Experts


class GroupedExperts(SequentialMLP):
    """This rank's experts as grouped GEMMs, sorted with the last expert first, like the weights in the DDP buffers."""

    recompute_activation = False
    weighs_inputs = False

    def __init__(self, *args: Any, sharded_experts: bool) -> None:
        """``sharded_experts``: the experts' data-parallel group differs from that of the other layers."""
        super().__init__(*args)
        self.kernels = GemmKernels()
        """Set by :func:`isthmus.engine.moe.gemm_choice.choose_gemms`."""
        self.multiply: GroupedMatmul = grouped_matmul
        """Set by :func:`isthmus.engine.moe.fp8_experts.use_fp8_experts`."""
        for expert in self.local_experts:
            for parameter in expert.parameters():
                parameter.allreduce = not sharded_experts
            if (bias := expert.linear_fc2.bias) is not None:
                # Megatron-Core sums it over tp; here each rank has all tokens and the whole gradient.
                bias.sequence_parallel = False
                if sharded_experts:
                    mark_expert_parameter(bias, self.tp_group, replicated=True)

    def forward(self, hidden: Tensor, weights: Tensor, sizes: GroupSizes) -> Tensor:
        """``hidden`` [n, H] is sorted by expert, ``sizes`` are rows per expert, and ``weights`` [n] scale the results.

        Or the inputs (``weighs_inputs``): as the first layer has no bias then, its outputs.

        With tensor-parallel experts the result is this rank's part of a sum.
        """
        experts = list(reversed(self.local_experts))
        wide = self._linear([expert.linear_fc1 for expert in experts], hidden, sizes)
        if experts[0].linear_fc1.bias is not None:
            wide = wide + _by_row([expert.linear_fc1.bias for expert in experts], sizes.counts, wide)
        if self.weighs_inputs:
            wide, weights = wide * _column(weights, wide), torch.ones_like(weights)
        activation, recomputed = experts[0].activation_func, self.recompute_activation
        if compiles(wide) and isinstance(activation, Activation):
            compute: Callable[[], Tensor] = functools.partial(fused(weighted(activation.function)), wide, weights)
            inner = compute()
        else:
            column, activated = _column(weights, wide), activation(wide)
            with recompute_if(recomputed, [activated], lambda: [activation(wide)]):
                inner = activated * column

            def compute() -> Tensor:
                return activation(wide) * column

        with recompute_if(recomputed, [inner], lambda: [compute()]):
            out = self._linear([expert.linear_fc2 for expert in experts], inner, sizes)
        if experts[0].linear_fc2.bias is None:
            return out
        # The ranks' parts are summed: each adds its share of the bias, and the gradient is that of the whole bias.
        bias = _by_row([expert.linear_fc2.bias for expert in experts], sizes.counts, out)
        return torch.addcmul(out, bias + bias.detach() * (1 / self.tp_group.size() - 1), _column(weights, out))

    def _linear(self, layers: list[Any], rows: Tensor, sizes: GroupSizes) -> Tensor:
        """Rows times the weight of their expert, with its adapters; a part of a sum if etp shards the columns."""
        out = grouped_linear(rows, sizes, [layer.weight for layer in layers], self.kernels, self.multiply)
        adapters = [adapter for layer in layers if (adapter := linear_adapters(layer)) is not None]
        if not adapters:
            return out
        down, up = [adapter.joined_a() for adapter in adapters], [adapter.joined_b() for adapter in adapters]
        # Of the tensor that all etp ranks have, each computes a part of the gradient.
        if isinstance(layers[0], ColumnParallelLinear):
            down = self._with_summed_grads(down)
        else:
            up = self._with_summed_grads(up)
        return out + grouped_linear(grouped_linear(rows, sizes, down, self.kernels), sizes, up, self.kernels)

    def _with_summed_grads(self, tensors: list[Tensor]) -> list[Tensor]:
        """The same tensors; their gradients are summed over the etp ranks, in one collective."""
        if self.tp_group.size() == 1:
            return tensors
        return list(copy_to_tensor_model_parallel_region(torch.stack(tensors), group=self.tp_group).unbind())


@functools.cache  # one function for all layers, whose regions belong to it
def weighted(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """The product of an activation [n, F] and the weights [n] of its rows."""

    def weighted_activation(x: Tensor, weights: Tensor) -> Tensor:
        return activation(x) * _column(weights, x)

    return weighted_activation


def _column(weights: Tensor, rows: Tensor) -> Tensor:
    return weights.to(rows.dtype)[:, None]


def _by_row(biases: list[Tensor], counts: Tensor, rows: Tensor) -> Tensor:
    return torch.stack(biases).repeat_interleave(counts, dim=0, output_size=rows.size(0))


class MoeBlock(MegatronModule):
    uses_weights_directly = True
    """Read by :class:`isthmus.engine.parallel.ddp.OverlappingDataParallel`."""
    pre_shared_layernorm: Any
    post_shared_layernorm: Any
    pre_routed_layernorm: Any
    post_routed_layernorm: Any

    def __init__(
        self,
        config: DecoderConfig,
        submodules: MLPSubmodules,
        *,
        shared: MLPSubmodules,
        moe: Experts,
        settings: MoeConfig,
        norm: Callable[[DecoderConfig], nn.Module],
        layer: int = 0,
    ) -> None:
        """``shared`` are the modules of shared experts, ``norm`` is that of hidden states, ``layer`` counts from 0 in
        the whole model.
        """
        super().__init__(config)
        groups = get_default_pg_collection()
        self.router = TopKRouter(config, moe, settings, groups, layer)
        expert_config = copy(config)
        expert_config.add_bias_linear = moe.expert_mlp_bias
        self.fc1_latent_proj: ReplicatedLinear | None = None
        self.fc2_latent_proj: ReplicatedLinear | None = None
        if moe.latent_size is not None:
            expert_config.hidden_size = moe.latent_size
            self.fc1_latent_proj = ReplicatedLinear(config, config.hidden_size, moe.latent_size)
            self.fc2_latent_proj = ReplicatedLinear(config, moe.latent_size, config.hidden_size)
        sharded_experts = groups.ep.size() > 1 or groups.expt_tp.size() != groups.tp.size()
        self.experts = GroupedExperts(
            moe.num_experts // groups.ep.size(), expert_config, submodules, groups, sharded_experts=sharded_experts
        )
        self.experts.weighs_inputs = moe.weighs_inputs
        self.dispatch = dispatcher(
            settings.dispatcher,
            groups,
            num_experts=moe.num_experts,
            sequence_parallel=config.sequence_parallel,
            capacity_factor=settings.capacity_factor,
        )
        self.shared_mean: bool = moe.shared_mean
        self.shared_experts: SharedExpertMLP | None = None
        if moe.shared_ffn_hidden_size:
            self.shared_experts = SharedExpertMLP(config, shared, moe.shared_gate, groups)
        names = ("pre_shared", "post_shared", "pre_routed", "post_routed") if moe.branch_norms else ()
        self.norms: list[str] = [f"{name}_layernorm" for name in names]
        for name in self.norms:
            self.add_module(name, norm(config))
        self.output_bias: nn.Parameter | None = None
        if moe.output_bias:
            self.output_bias = nn.Parameter(torch.zeros(config.hidden_size, dtype=config.params_dtype))
            self.output_bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.layer = layer
        self.recomputed: bool = "moe" in config.recomputed
        self.experts.recompute_activation = "moe_act" in config.recomputed

    def forward(self, hidden_states: Tensor, batch: PackedBatch | None = None) -> tuple[Tensor, None]:
        """``hidden_states`` and the result are [T, 1, H], or [T / tp, 1, H] under sequence parallelism."""

        def run(hidden_states: Tensor) -> Tensor:
            hidden = hidden_states.squeeze(1)
            weights, chosen = self.router(hidden, batch)
            # A dispatcher that waits for the GPU calls it before, so that the GPU has work meanwhile.
            shared = functools.cache(lambda: self._shared(hidden_states))
            if self.norms:
                hidden = self.pre_routed_layernorm(hidden)
            if self.fc1_latent_proj is not None:
                hidden = self.fc1_latent_proj(hidden)
            out: Tensor = self.dispatch(hidden, weights, chosen, self.experts, shared)[:, None]
            if self.fc2_latent_proj is not None:
                out = self.fc2_latent_proj(out)
            if self.norms:
                out = self.post_routed_layernorm(out)
            if (added := shared()) is not None:
                out = (out + added) / 2 if self.shared_mean else out + added
            return out if self.output_bias is None else out + self.output_bias

        if self.recomputed and self.training:
            return tensor_parallel.checkpoint(with_this_batch(run), False, hidden_states), None
        return run(hidden_states), None

    def _shared(self, hidden_states: Tensor) -> Tensor | None:
        """The output of the shared experts; None without any."""
        if self.shared_experts is None:
            return None
        if not self.norms:
            return self.shared_experts(hidden_states)
        normed: Tensor = self.post_shared_layernorm(self.shared_experts(self.pre_shared_layernorm(hidden_states)))
        return normed
