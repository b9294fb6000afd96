"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Depth k combines a token's hidden state with the embedding of the token k positions later, and predicts the token
k + 1 positions later. As in Megatron-Core, the first depth takes the hidden states after the model's last norm.
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
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.layers.linear import ColumnParallelLinear
from isthmus.engine.spec import layer_spec, norm_spec
from isthmus.families.architecture import Architecture


class MtpLayer(MultiTokenPredictionLayer):
    """Megatron-Core's layer with a forward pass for packed samples."""

    def forward(  # type: ignore[override]
        self, hidden: Tensor, embedded: Tensor, tables: Tensor | None, batch: PackedBatch
    ) -> Tensor:
        """Compute the input of the output layer and of the next depth, of the shape of ``hidden`` and ``embedded``.

        ``hidden`` comes from the previous depth, ``embedded`` from the tokens k positions later.
        """

        def run(hidden: Tensor, embedded: Tensor) -> Tensor:
            joined = self._concat_embeddings(hidden, embedded)
            found, _ = self.transformer_layer(
                hidden_states=joined, attention_mask=None, rotary_pos_emb=tables, packed_seq_params=batch
            )
            return self.final_layernorm(found)

        if self.config.recompute_granularity == "full" and self.training:
            return tensor_parallel.checkpoint(run, False, hidden, embedded)
        return run(hidden, embedded)


def mtp_spec(architecture: Architecture, settings: MoeConfig) -> ModuleSpec:
    norm = norm_spec(architecture)
    layers = [
        ModuleSpec(
            module=MtpLayer,
            submodules=MultiTokenPredictionLayerSubmodules(
                enorm=norm,
                hnorm=norm,
                eh_proj=ColumnParallelLinear,
                transformer_layer=layer_spec(
                    architecture, settings, moe=architecture.is_moe(architecture.num_layers + depth)
                ),
                layer_norm=norm,
            ),
        )
        for depth in range(architecture.mtp_layers)
    ]
    return ModuleSpec(
        module=MultiTokenPredictionBlock, submodules=MultiTokenPredictionBlockSubmodules(layer_specs=layers)
    )


def mtp_positions(loss_positions: Tensor, position_ids: Tensor, depths: int) -> Sequence[Tensor]:
    """For each depth k, from 1: the positions whose label k positions later, in the same sample, is a loss token.

    ``loss_positions`` are int64 [n], ``position_ids`` int64 [T].
    """
    return [loss_positions[position_ids[loss_positions] >= depth] - depth for depth in range(1, depths + 1)]
