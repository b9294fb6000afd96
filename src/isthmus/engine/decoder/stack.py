"""Consecutive layers of a model, and the decoder layers of a pipeline stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping, replace_prefix_for_sharding
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import sharded_state_dict_default
from torch import Tensor, nn

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.decoder_config import DecoderConfig


class LayerStack(MegatronModule):
    """Layers with the checkpoint keys of Megatron-Core's blocks."""

    def __init__(
        self, config: DecoderConfig, layers: Iterable[nn.Module], *, first: int = 0, stacked: int | None = None
    ) -> None:
        """``first`` is the model-wide number, from 0, of the first layer.

        ``stacked`` layers are one tensor in a checkpoint; None: each layer has keys of its own.
        """
        super().__init__(config)
        self.layers: Any = nn.ModuleList(layers)
        self.first = first
        self.stacked = stacked

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for number, layer in enumerate(self.layers, start=self.first):
            live_prefix = f"{prefix}layers.{number - self.first}."
            offsets = [] if self.stacked is None else [(0, number, self.stacked)]
            entries = layer.sharded_state_dict(live_prefix, offsets, metadata)
            key = f"{prefix}layers." if self.stacked is not None else f"{prefix}layers.{number}."
            replace_prefix_for_sharding(entries, live_prefix, key)
            state |= entries
        tp = parallel_state.get_tensor_model_parallel_group()
        for name, module in self.named_children():
            if module is not self.layers:
                state |= sharded_state_dict_default(module, f"{prefix}{name}.", sharded_offsets, metadata, tp_group=tp)
        return state


class DecoderStack(LayerStack):
    """The decoder layers of a pipeline stage, and the norm behind the last of them."""

    def __init__(
        self,
        config: DecoderConfig,
        layers: Iterable[nn.Module],
        final_norm: nn.Module | None,
        *,
        final_norm_key: str,
        **numbers: Any,
    ) -> None:
        super().__init__(config, layers, **numbers)
        self.final_layernorm = final_norm
        self.final_norm_key = final_norm_key
        self.input_tensor: Tensor | None = None
        """Hidden states from the previous stage."""
        full = config.recompute_granularity == "full"
        is_uniform = config.recompute_method == "uniform"
        self.recomputed_layers: int = (
            0 if not full else len(self.layers) if is_uniform else config.recompute_num_layers or 0
        )

    def forward(
        self,
        hidden_states: Tensor | None,
        *,
        rotary_pos_emb: Tensor | None,
        packed_seq_params: PackedBatch,
        layer_inputs: Sequence[Tensor] = (),
        key_sources: Mapping[int, int | None] = MappingProxyType({}),
    ) -> Tensor:
        """Hidden states [T, 1, H], or [T / tp, 1, H] under sequence parallelism; None: those of the previous stage.

        ``layer_inputs`` are the layers' own inputs, if they have any. ``key_sources`` has the number of the layer, from
        0, whose keys a layer attends to, if they are not its own.
        """
        hidden = self.input_tensor if hidden_states is None else hidden_states
        assert hidden is not None
        recomputed = self.recomputed_layers if self.training else 0
        shared_keys: dict[int, Sequence[Tensor]] = {}
        for index, layer in enumerate(self.layers):
            run = partial(_run, layer, packed_seq_params)
            layer_input = layer_inputs[index] if layer_inputs else None
            source = key_sources.get(self.first + index)
            inputs: list[Any] = [hidden, rotary_pos_emb, layer_input, *(() if source is None else shared_keys[source])]
            outputs = tensor_parallel.checkpoint(run, False, *inputs) if index < recomputed else run(*inputs)
            hidden, *shared_keys[self.first + index] = outputs if isinstance(outputs, tuple) else (outputs,)
        if self.final_layernorm is not None:
            hidden = self.final_layernorm(hidden)
        return hidden

    def sharded_state_dict(self, prefix: str = "", *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().sharded_state_dict(prefix, *args, **kwargs)
        apply_prefix_mapping(state, {f"{prefix}final_layernorm.": prefix + self.final_norm_key})
        return state


def _run(
    layer: Any,
    batch: PackedBatch,
    hidden: Tensor,
    tables: Tensor | None,
    layer_input: Tensor | None,
    *shared_keys: Tensor,
) -> Tensor | tuple[Tensor, ...]:
    """The output of a layer, with its keys and values if other layers attend to them."""
    kwargs: dict[str, Any] = {} if layer_input is None else {"layer_input": layer_input}
    kwargs |= {"shared_keys": shared_keys} if shared_keys else {}
    out: Tensor = layer(hidden, rotary_pos_emb=tables, packed_seq_params=batch, **kwargs)
    keys = layer.take_keys()
    return (out, *keys) if keys else out
