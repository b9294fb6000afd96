"""A decoder layer whose norms stand where its architecture has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn

from isthmus.engine.layers.attention import Segments
from isthmus.families.architecture import Form


@dataclass
class LayerSubmodules(TransformerLayerSubmodules):
    """Megatron-Core's parts of a layer, and the norms behind attention and behind the feed-forward block."""

    post_self_attn_layernorm: ModuleSpec | type = IdentityOp
    post_mlp_layernorm: ModuleSpec | type = IdentityOp


class ShapedLayer(TransformerLayer):
    """Megatron-Core's layer with a forward pass for every :data:`~isthmus.families.architecture.Form`.

    Parameters, sharding and checkpoint names are the parent's, with those of two more norms.
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

    def forward(
        self, hidden_states: Tensor, *, rotary_pos_emb: Tensor | None, packed_seq_params: Segments, **_unused: Any
    ) -> tuple[Tensor, None]:
        """Run the layer on one packed line.

        Args:
            hidden_states: [T, 1, H], or [T / tp, 1, H] under sequence parallelism.
            rotary_pos_emb: the table of angles, None where positions are learned.
            packed_seq_params: the samples of the line.

        Returns:
            The new hidden states, and None for the context that a decoder does not have.
        """
        normed = self.input_layernorm(hidden_states)
        attended = self._finished(
            self.self_attention(
                normed, attention_mask=None, rotary_pos_emb=rotary_pos_emb, packed_seq_params=packed_seq_params
            ),
            self.post_self_attn_layernorm,
        )
        beside = self.form in ("parallel", "parallel_two_norms")
        stream = hidden_states if beside else hidden_states + attended
        fed = normed if self.form == "parallel" else self.pre_mlp_layernorm(stream)
        made = (
            tensor_parallel.checkpoint(self.mlp, False, fed) if self.recompute_mlp and self.training else self.mlp(fed)
        )
        output = self._finished(made, self.post_mlp_layernorm)
        return stream + (attended + output if beside else output), None

    def _finished(self, output_with_bias: tuple[Tensor, Tensor | None], norm: nn.Module) -> Tensor:
        """What a block adds to the stream: its output with the bias, normalised and scaled."""
        output, bias = output_with_bias
        output = norm(output if bias is None else output + bias)
        return output if self.residual_multiplier == 1 else output * self.residual_multiplier
