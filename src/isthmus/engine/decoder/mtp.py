"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2).

Depth k combines a token's hidden state with the embedding of the token k positions later, and predicts the token
k + 1 positions later. As in Megatron-Core, the first depth takes the hidden states after the model's last norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.decoder.spec import build_layer, build_norm
from isthmus.engine.decoder_config import DecoderConfig
from isthmus.engine.linear.linear import ColumnParallelLinear
from isthmus.families.architecture import Architecture


class MtpLayer(MegatronModule):
    """A layer with Megatron-Core's names that predicts one more token."""

    def __init__(self, config: DecoderConfig, architecture: Architecture, depth: int) -> None:
        """``depth`` counts from 1."""
        super().__init__(config)
        self.enorm, self.hnorm = (build_norm(architecture, config) for _ in range(2))
        self.eh_proj = ColumnParallelLinear(
            2 * config.hidden_size,
            config.hidden_size,
            config=config,
            init_method=config.init_method,
            gather_output=False,
            bias=False,
            skip_bias_add=False,
            is_expert=False,
        )
        self.transformer_layer = build_layer(architecture, config, architecture.num_layers + depth - 1)
        self.final_layernorm = build_norm(architecture, config)
        self._hidden_first = architecture.pattern.mtp_hidden_first

    @property
    def mtp_model_layer(self) -> Any:
        """Its name in megatron-core 0.17 and newer, whose schedules read it; in checkpoints the older one stays."""
        return self.transformer_layer

    def forward(self, hidden: Tensor, embedded: Tensor, tables: Tensor | None, batch: PackedBatch) -> Tensor:
        """Compute the input of the output layer and of the next depth, of the shape of ``hidden`` and ``embedded``.

        ``hidden`` comes from the previous depth, ``embedded`` from the tokens k positions later.
        """

        def run(hidden: Tensor, embedded: Tensor) -> Tensor:
            inputs = (self.enorm(embedded), self.hnorm(hidden))
            joined, _ = self.eh_proj(torch.cat(inputs[::-1] if self._hidden_first else inputs, -1))
            joined = gather_from_tensor_model_parallel_region(joined)
            if self.config.sequence_parallel:
                joined = scatter_to_sequence_parallel_region(joined)
            mtp_hidden = self.transformer_layer(joined, rotary_pos_emb=tables, packed_seq_params=batch)
            output: Tensor = self.final_layernorm(mtp_hidden)
            return output

        if self.config.recompute_granularity == "full" and self.training:
            return tensor_parallel.checkpoint(run, False, hidden, embedded)
        return run(hidden, embedded)


def mtp_positions(loss_positions: Tensor, position_ids: Tensor, depths: int) -> Sequence[Tensor]:
    """For each depth k, from 1: the positions whose label k positions later, in the same sample, is a loss token.

    ``loss_positions`` are int64 [n], ``position_ids`` int64 [T].
    """
    return [loss_positions[position_ids[loss_positions] >= depth] - depth for depth in range(1, depths + 1)]
