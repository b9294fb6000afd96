"""A decoder layer with any mixers and :data:`~isthmus.families.architecture.Form`, and its feed-forward block."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.dist_checkpointing.utils import apply_prefix_mapping
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import Tensor, nn

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.attention.self_attention import PackedSelfAttention
from isthmus.engine.decoder_config import DecoderConfig
from isthmus.engine.layers.dropout import ATTENTION_OUTPUT, MLP_OUTPUT, hidden_dropout
from isthmus.engine.layers.recompute import recompute_if
from isthmus.engine.lora.input_dropout import with_this_batch
from isthmus.families.blocks.layer import Form


class DenseMlp(MLP):
    """Megatron-Core's MLP, which recomputes its activations itself."""

    def __init__(self, config: DecoderConfig, *args: Any, width: int | None = None, **kwargs: Any) -> None:
        """``width`` is that of the block if it is not the model's."""
        if width is not None:
            config = copy(config)
            config.ffn_hidden_size = width
        super().__init__(config, *args, **kwargs)
        self.recomputed: bool = "mlp" in config.recomputed
        self.recompute_activation: bool = "mlp_act" in config.recomputed

    def forward(self, hidden_states: Tensor, _batch: PackedBatch | None = None) -> tuple[Tensor, Tensor | None]:
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


@dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """Blocks of a layer, which has at least one."""

    form: Form
    norm: Callable[[DecoderConfig], nn.Module]
    mixers: dict[str, ModuleSpec]
    """Mixers by attribute of the layer. They share the norm before them, and their outputs are added."""
    mlp: ModuleSpec | None
    residual_multiplier: float
    fused_norms: dict[str, str]
    """Name of a norm -> in a checkpoint."""
    mlp_has_norms: bool = False
    """The feed-forward block normalizes its input itself."""
    scalar: bool = False
    """The output of the layer is multiplied by a number that is not trained."""
    input: ModuleSpec | None = None
    """What adds the layer's own input of each token, see :mod:`isthmus.engine.decoder.layer_inputs`."""


class DecoderLayer(MegatronModule):
    """The mixers of a layer and its feed-forward block, with their norms, residuals and dropout.

    The output of the mixers is added to the residual stream in the kernel of the next norm. Names of modules are those
    of Megatron-Core.
    """

    fsdp_unit = "layer"

    def __init__(self, config: DecoderConfig, spec: LayerSpec, layer_number: int, pg_collection: Any) -> None:
        """``layer_number`` counts from 1 in the whole model."""
        super().__init__(config)
        self.spec = spec
        self.form = spec.form
        self.layer_number = layer_number
        mixed, pre, post = bool(spec.mixers), spec.form != "post", spec.form in ("post", "sandwich")
        self.parallel: bool = mixed and spec.form in ("parallel", "parallel_two_norms")
        self.recompute_norms: bool = "layernorm" in config.recomputed and pre

        def norm(exists: bool) -> Any:
            return spec.norm(config) if exists else None

        self.input_layernorm = norm(pre and mixed)
        for name, mixer in spec.mixers.items():
            built = build_module(mixer, config=config, layer_number=layer_number, pg_collection=pg_collection)
            self.add_module(name, built)
        has_mlp, shares_norm = spec.mlp is not None, self.parallel and spec.form == "parallel"
        self.pre_mlp_layernorm = norm(pre and has_mlp and not shares_norm and not spec.mlp_has_norms)
        self.mlp: Any = build_module(spec.mlp, config=config) if has_mlp else None
        self.post_self_attn_layernorm = norm(post and mixed)
        self.post_mlp_layernorm = norm(post and has_mlp)
        self.layer_input: Any = None if spec.input is None else build_module(spec.input, config=config)
        self.layer_scalar: nn.Parameter | None = None
        if spec.scalar:
            self.layer_scalar = nn.Parameter(torch.ones(1, dtype=config.params_dtype), requires_grad=False)

    def forward(
        self,
        hidden_states: Tensor,
        *,
        rotary_pos_emb: Tensor | None,
        packed_seq_params: PackedBatch,
        layer_input: Tensor | None = None,
        shared_keys: Sequence[Tensor] = (),
    ) -> Tensor:
        """``hidden_states`` and the result are [T, 1, H], or [T / tp, 1, H] under sequence parallelism.

        ``layer_input`` is the layer's own input of each token, ``shared_keys`` are keys and values of another layer.
        """
        out = self._blocks(hidden_states, rotary_pos_emb, packed_seq_params, shared_keys)
        if self.layer_input is not None:
            out = self.layer_input(out, layer_input)
        return out if self.layer_scalar is None else out * self.layer_scalar

    def take_keys(self) -> tuple[Tensor, ...]:
        """Keys and values of the last forward pass that other layers attend to; empty without such layers."""
        attention = getattr(self, "self_attention", None)
        keys: tuple[Tensor, ...] = attention.take_keys() if isinstance(attention, PackedSelfAttention) else ()
        return keys

    def _blocks(
        self, hidden_states: Tensor, rotary_pos_emb: Tensor | None, batch: PackedBatch, shared_keys: Sequence[Tensor]
    ) -> Tensor:
        normed, mixed = hidden_states, None
        keys = {"shared_keys": shared_keys} if shared_keys else {}
        if self.spec.mixers:
            if self.input_layernorm is not None:
                hidden_states, normed = self.input_layernorm(hidden_states, with_input=True)
            with recompute_if(self.recompute_norms, [normed], lambda: [self.input_layernorm(hidden_states)]):
                outputs = [
                    getattr(self, name)(normed, rotary_pos_emb=rotary_pos_emb, packed_seq_params=batch, **keys)
                    for name in self.spec.mixers
                ]
            mixed = self._residual(outputs, self.post_self_attn_layernorm, batch, ATTENTION_OUTPUT)
            if self.mlp is None:
                return hidden_states + mixed
        stream, norm = hidden_states, self.pre_mlp_layernorm
        if norm is None and not self.spec.mlp_has_norms:
            norm = self.input_layernorm
        if norm is None:
            stream = mlp_input = stream if mixed is None else stream + mixed
        elif self.parallel:
            mlp_input = normed if self.form == "parallel" else norm(stream)
        elif mixed is None:
            mlp_input = norm(stream)
        else:
            stream, mlp_input = norm(mixed, stream)
        with recompute_if(self.recompute_norms and norm is not None, [mlp_input], lambda: [norm(stream)]):
            output = self.mlp(mlp_input, batch)
        added = self._residual([output], self.post_mlp_layernorm, batch, MLP_OUTPUT)
        return stream + (mixed + added if mixed is not None and self.parallel else added)

    def _residual(
        self, outputs: list[tuple[Tensor, Tensor | None]], norm: nn.Module | None, batch: PackedBatch, place: int
    ) -> Tensor:
        """What blocks of which each returns an output and a bias add to the residual stream."""
        total, *others = (output if bias is None else output + bias for output, bias in outputs)
        for other in others:
            total = total + other
        if norm is not None:
            total = norm(total)
        if self.training:
            total = hidden_dropout(total, batch, self.config.hidden_dropout, layer=self.layer_number, place=place)
        multiplier = self.spec.residual_multiplier
        return total if multiplier == 1 else total * multiplier

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        state: dict[str, Any] = super().sharded_state_dict(prefix, sharded_offsets, metadata)
        apply_prefix_mapping(
            state, {prefix + live_name: prefix + name for live_name, name in self.spec.fused_norms.items()}
        )
        return state
