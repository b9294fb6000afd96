"""Inputs of each layer besides the hidden states (Gemma 3n): vectors of tokens from a table, and their projection."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core.tensor_parallel import VocabParallelEmbedding
from megatron.core.transformer.module import MegatronModule
from torch import Tensor, nn

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.decoder.embedding import embed
from isthmus.engine.decoder_config import DecoderConfig
from isthmus.engine.layers.norm import RMSNorm
from isthmus.engine.linear.linear import ReplicatedLinear
from isthmus.families.architecture import Architecture


class LayerInputs(MegatronModule):
    """The inputs of all layers: the scaled sum of a table's row, which is sharded over tp, and a normed projection."""

    def __init__(self, config: DecoderConfig, architecture: Architecture, rows: int) -> None:
        """``rows`` are those of the table, with padding."""
        super().__init__(config)
        self.width: int = architecture.embedding.layer_input_size
        channels = architecture.num_layers * self.width
        self.word_embeddings = VocabParallelEmbedding(
            rows, channels, init_method=config.init_method, reduce_scatter_embeddings=False, config=config
        )
        self.linear_down_proj = ReplicatedLinear(config, config.hidden_size, channels)
        self.layernorm = RMSNorm(config, self.width, architecture.norm.norm_epsilon)

    def forward(self, hidden: Tensor, input_ids: Tensor, *, packed_seq_params: PackedBatch) -> Tensor:
        """[layers, T, 1, width] of embeddings ``hidden`` [T, 1, H] and int64 [T] tokens.

        Under sequence parallelism this rank's T / tp embeddings, and of all T tokens.
        """
        del packed_seq_params  # for hooks
        embedded = embed(self.word_embeddings, input_ids, sequence_parallel=self.config.sequence_parallel)
        # Rounded to the model's dtype first, as transformers does.
        embedded = embedded * torch.tensor(self.width**0.5, dtype=embedded.dtype)
        projected = self.linear_down_proj(hidden) * self.config.hidden_size**-0.5
        normed = self.layernorm(projected.unflatten(-1, (-1, self.width)))
        both: Tensor = (normed + embedded.unflatten(-1, (-1, self.width))) * 2**-0.5
        return both.permute(2, 0, 1, 3)


class LayerInputBlock(MegatronModule):
    """Adds ``norm(up(activation(down(x)) * input))`` to the hidden state x."""

    def __init__(
        self,
        config: DecoderConfig,
        *,
        width: int,
        activation: Callable[[Tensor], Tensor],
        norm: Callable[[DecoderConfig], nn.Module],
    ) -> None:
        super().__init__(config)
        self.activation = activation
        self.linear_down_proj = ReplicatedLinear(config, config.hidden_size, width)
        self.linear_up_proj = ReplicatedLinear(config, width, config.hidden_size)
        self.layernorm: nn.Module = norm(config)

    def forward(self, hidden: Tensor, layer_input: Tensor) -> Tensor:
        """``hidden`` and the result are [T, 1, H], ``own`` [T, 1, width]; T / tp under sequence parallelism."""
        gated = self.activation(self.linear_down_proj(hidden)) * layer_input
        added: Tensor = self.layernorm(self.linear_up_proj(gated))
        return hidden + added
