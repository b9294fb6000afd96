"""Gated short convolution of LFM2 over packed samples: ``out_proj(C * convolution(B * x))``."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from isthmus.engine.decoder_config import DecoderConfig
from isthmus.engine.layers.sequence_states import LayerStates
from isthmus.engine.mixers.sharded_mixer import DepthwiseConvolution, ShardedMixer
from isthmus.families.blocks.short_convolution import ShortConvolution


class ShortConvolutionMixer(ShardedMixer):
    """The rows of ``in_proj`` are B, C and x; channels are sharded over the tensor-parallel ranks."""

    def __init__(
        self, config: DecoderConfig, layer_number: int, *, block: ShortConvolution, pg_collection: Any
    ) -> None:
        self.layer_number = layer_number
        sizes, hidden = block, block.hidden_size
        super().__init__(config, pg_collection, rows=3 * hidden, width=hidden, biases=(sizes.bias, sizes.bias))
        channels = hidden // self.tp_group.size()
        self.sections = dict.fromkeys(("in_proj.weight", "in_proj.bias"), (channels, channels, channels))
        self.conv1d = DepthwiseConvolution(channels, sizes.kernel, bias=sizes.bias, dtype=config.params_dtype)

    def mix(self, projected: tuple[Tensor, ...], lengths: tuple[int, ...], states: LayerStates | None) -> Tensor:
        b, c, x = projected[0].chunk(3, dim=-1)
        return c * self.conv1d(b * x, lengths, activated=False, states=states)
