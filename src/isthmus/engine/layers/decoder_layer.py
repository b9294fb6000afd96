"""A decoder layer for any :data:`~isthmus.families.architecture.Form`, and its feed-forward block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.layers.dropout import ATTENTION_OUTPUT, MLP_OUTPUT, hidden_dropout
from isthmus.engine.layers.recompute import recompute_if
from isthmus.engine.lora.input_dropout import with_this_batch
from isthmus.families.architecture import Form


class DenseMlp(MLP):
    """Megatron-Core's MLP, which recomputes its activations itself."""

    recomputed = False
    recompute_activation = False

    def forward(self, hidden_states: Tensor, **_unused: Any) -> tuple[Tensor, Tensor | None]:
        if not (self.recomputed and self.training):
            return self._compute(hidden_states)
        # A recomputed region must not return the bias: its gradient would run the region's backward pass without end.
        run = self._compute
        again = with_this_batch(lambda x: run(x)[0])
        return tensor_parallel.checkpoint(again, False, hidden_states), self.linear_fc2.bias

    def _compute(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        wide, bias = self.linear_fc1(hidden_states)
        if bias is not None:
            wide = wide + bias
        inner = self.activation_func(wide)
        with recompute_if(self.recompute_activation, [inner], lambda: [self.activation_func(wide)]):
            return self.linear_fc2(inner)


@dataclass
class LayerSubmodules(TransformerLayerSubmodules):
    """Adds norms after attention and after the feed-forward block."""

    post_self_attn_layernorm: ModuleSpec | type = IdentityOp
    post_mlp_layernorm: ModuleSpec | type = IdentityOp


class DecoderLayer(TransformerLayer):
    """Megatron-Core's layer with a forward pass for every form, norms after its blocks, and dropout.

    The attention output is added to the residual stream in the kernel of the next norm.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: LayerSubmodules,
        *args: Any,
        form: Form,
        residual_multiplier: float,
        **kwargs: Any,
    ) -> None:
        super().__init__(config, submodules, *args, **kwargs)
        self.form = form
        self.residual_multiplier = residual_multiplier
        shape = {"config": config, "hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
        self.post_self_attn_layernorm = build_module(submodules.post_self_attn_layernorm, **shape)
        self.post_mlp_layernorm = build_module(submodules.post_mlp_layernorm, **shape)
        self.recompute_norms = "layernorm" in config.recomputed and form != "post"

    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor | None, packed_seq_params: PackedBatch, **_unused: Any
    ) -> tuple[Tensor, None]:
        """``hidden_states`` are [T, 1, H], or [T / tp, 1, H] under sequence parallelism. The context is None."""
        normed = self.input_layernorm(hidden_states)
        with recompute_if(self.recompute_norms, [normed], lambda: [self.input_layernorm(hidden_states)]):
            attended_with_bias = self.self_attention(
                normed, attention_mask=None, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params
            )
        attended = self._residual(
            attended_with_bias, self.post_self_attn_layernorm, packed_seq_params, ATTENTION_OUTPUT
        )
        parallel = self.form in ("parallel", "parallel_two_norms")
        norm = self.input_layernorm if self.form == "parallel" else self.pre_mlp_layernorm
        if parallel:
            stream = hidden_states
            mlp_input = normed if self.form == "parallel" else norm(stream)
        elif self.form == "post":
            stream = mlp_input = hidden_states + attended
        else:
            stream, mlp_input = norm(attended, hidden_states)
        with recompute_if(self.recompute_norms, [mlp_input], lambda: [norm(stream)]):
            output_with_bias = self.mlp(mlp_input)
        output = self._residual(output_with_bias, self.post_mlp_layernorm, packed_seq_params, MLP_OUTPUT)
        return stream + (attended + output if parallel else output), None

    def _residual(
        self, output_with_bias: tuple[Tensor, Tensor | None], norm: nn.Module, batch: PackedBatch, place: int
    ) -> Tensor:
        output, bias = output_with_bias
        output = norm(output if bias is None else output + bias)
        if self.training:
            output = hidden_dropout(output, batch, self.hidden_dropout, layer=self.layer_number, place=place)
        return output if self.residual_multiplier == 1 else output * self.residual_multiplier
