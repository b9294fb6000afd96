"""Layers behind the last, which predict the token after the next: DeepSeek-V3, arXiv 2412.19437, section 2.2.

At depth k the hidden state of a token and the embedding of the token k places on are normalised, laid side by side,
projected to the model's width and go through a layer of their own; a norm and the model's own output layer make logits
of them, for the token k + 1 places on. Embedding and output layer are the model's, not copies. As in Megatron-Core (and
in what DeepSeek's weights are served with) the first depth takes the hidden states behind the model's last norm.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core import tensor_parallel
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from isthmus.config.schema.moe import MoeConfig
from isthmus.engine.layers.attention import Segments
from isthmus.engine.layers.linear import ColumnParallelLinear
from isthmus.engine.spec import layer_spec, norm_spec
from isthmus.families.architecture import Architecture


class AheadLayer(MultiTokenPredictionLayer):
    """Megatron-Core's layer with a forward pass for packed lines; parameters and checkpoint names are the parent's."""

    def forward(  # type: ignore[override]
        self, hidden: Tensor, embedded: Tensor, tables: Tensor | None, segments: Segments
    ) -> Tensor:
        """One depth further.

        Args:
            hidden: [T, 1, H] of the depth before, or [T / tp, 1, H] under sequence parallelism.
            embedded: as large, the embeddings of the tokens this many places on.
            tables: angles of rotary positions.
            segments: the samples of the line.

        Returns:
            What the output layer and the next depth take, as large as ``hidden``.
        """

        def ahead(hidden: Tensor, embedded: Tensor) -> Tensor:
            joined = self._concat_embeddings(hidden, embedded)
            found, _ = self.transformer_layer(
                hidden_states=joined, attention_mask=None, rotary_pos_emb=tables, packed_seq_params=segments
            )
            normed: Tensor = self.final_layernorm(found)
            return normed

        if self.config.recompute_granularity == "full" and self.training:
            return tensor_parallel.checkpoint(ahead, False, hidden, embedded)  # type: ignore[no-any-return]
        return ahead(hidden, embedded)


def ahead_spec(architecture: Architecture, settings: MoeConfig) -> ModuleSpec:
    """All layers ahead, which stand on the last stage."""
    norm = norm_spec(architecture)
    layers = [
        ModuleSpec(
            module=AheadLayer,
            submodules=MultiTokenPredictionLayerSubmodules(
                enorm=norm,
                hnorm=norm,
                eh_proj=ColumnParallelLinear,
                transformer_layer=layer_spec(
                    architecture, moe=architecture.is_moe(architecture.num_layers + depth), settings=settings
                ),
                layer_norm=norm,
            ),
        )
        for depth in range(architecture.mtp_layers)
    ]
    return ModuleSpec(
        module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=layers)
    )


def places_ahead(learned: Tensor, position_ids: Tensor, depths: int) -> Sequence[Tensor]:
    """For each depth k, from 1: the places of a line from which a learned label is seen k places on, in its own sample.

    Args:
        learned: int64 [n], the places whose own label is learned.
        position_ids: int64 [T], from 0 in each sample.
        depths: how many layers there are.
    """
    return [learned[position_ids[learned] >= depth] - depth for depth in range(1, depths + 1)]
