"""What each layer of a decoder is made of: plain PyTorch modules in place of TransformerEngine's and Apex's."""

from __future__ import annotations

from functools import partial

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import nn

from isthmus.config.schema.moe import MoeConfig
from isthmus.engine.attention.multi_latent_attention import MultiLatentAttention
from isthmus.engine.attention.rope import rotary_columns
from isthmus.engine.attention.self_attention import PackedSelfAttention
from isthmus.engine.decoder.layer import DecoderLayer, DenseMlp, LayerSpec
from isthmus.engine.decoder.layer_inputs import LayerInputBlock
from isthmus.engine.decoder_config import DecoderConfig
from isthmus.engine.layers.activation import Activation, Xielu, activation_function
from isthmus.engine.layers.norm import LayerNorm, RMSNorm
from isthmus.engine.linear.linear import ColumnParallelLinear, RowParallelLinear, with_bias
from isthmus.engine.linear.multiplied import multiplied
from isthmus.engine.mixers.gated_delta_net import GatedDeltaNet
from isthmus.engine.mixers.kimi_delta_attention import KimiDeltaAttention
from isthmus.engine.mixers.mamba2_mixer import Mamba2Mixer
from isthmus.engine.mixers.mamba_mixer import MambaMixer
from isthmus.engine.mixers.short_convolution import ShortConvolutionMixer
from isthmus.engine.moe.moe_layer import MoeBlock
from isthmus.engine.tensor_names import fused_norms
from isthmus.families.architecture import Architecture
from isthmus.families.blocks.attention import Attention
from isthmus.families.blocks.block import Mixer
from isthmus.families.blocks.feed_forward import Experts, Mlp
from isthmus.families.blocks.latent_attention import LatentAttention
from isthmus.families.blocks.layer import Layer

MIXERS: dict[str, tuple[str, type]] = {
    "gated_delta_net": ("self_attention", GatedDeltaNet),
    "kimi_delta_attention": ("self_attention", KimiDeltaAttention),
    "mamba2": ("mixer", Mamba2Mixer),
    "mamba": ("mixer", MambaMixer),
    "short_convolution": ("mixer", ShortConvolutionMixer),
}
"""Attribute of the layer and class of each mixer other than attention, see :func:`mixer_spec`."""


def build_layer(architecture: Architecture, config: DecoderConfig, layer: int) -> DecoderLayer:
    """``layer`` counts from 0 in the whole model; MTP layers follow the last layer."""
    spec = layer_spec(architecture, architecture.all_layers[layer], config.experts)
    return DecoderLayer(config, spec, layer + 1, ProcessGroupCollection.use_mpu_process_groups())


def build_norm(architecture: Architecture, config: DecoderConfig) -> nn.Module:
    """A norm of hidden states."""
    shape = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
    norm: nn.Module = build_module(norm_spec(architecture), config=config, **shape)
    return norm


def norm_spec(architecture: Architecture) -> ModuleSpec | type:
    with_weight = architecture.norm.norm_weight
    if architecture.norm.normalization == "RMSNorm":
        return RMSNorm if with_weight else ModuleSpec(module=RMSNorm, params={"weight": False})
    params = {"bias": architecture.norm.norm_bias and with_weight, "weight": with_weight}
    return ModuleSpec(module=LayerNorm, params=params)


def layer_spec(architecture: Architecture, layer: Layer, settings: MoeConfig) -> LayerSpec:
    experts = layer.experts
    return LayerSpec(
        form=layer.form,
        norm=partial(build_norm, architecture),
        mixers=dict(mixer_spec(mixer, layer, architecture) for mixer in layer.mixers),
        mlp=feed_forward_spec(architecture, layer, settings),
        residual_multiplier=architecture.pattern.residual_multiplier,
        # Checkpoint keys follow TransformerEngine's fused modules, so that every spec can load them.
        fused_norms=fused_norms(layer.mixer_kinds, latent=architecture.latent is not None, moe=experts is not None),
        mlp_has_norms=experts is not None and experts.branch_norms,
        scalar=architecture.pattern.layer_scalars,
        input=layer_input_spec(architecture),
    )


def feed_forward_spec(architecture: Architecture, layer: Layer, settings: MoeConfig) -> ModuleSpec | None:
    block = layer.feed_forward
    if isinstance(block, Experts):
        norm, mlp = partial(build_norm, architecture), block.in_layer
        shared = mlp_modules(mlp, moe=True, limit=mlp.limit)
        params = {"moe": block, "settings": settings, "layer": layer.number, "norm": norm, "shared": shared}
        return ModuleSpec(module=MoeBlock, params=params, submodules=mlp_modules(mlp, moe=True, limit=block.limit))
    if block is None:
        return None
    params = {"width": block.width} if block.width != architecture.mlp.ffn_hidden_size else {}
    module = multiplied(DenseMlp, 1.0, block.mlp_multipliers[1])
    return ModuleSpec(module=module, params=params, submodules=mlp_modules(block, moe=False, limit=block.limit))


def layer_input_spec(architecture: Architecture) -> ModuleSpec | None:
    """What adds a layer's own input of each token; None if layers have none."""
    if not architecture.embedding.layer_input_size:
        return None
    function = activation_function(architecture.mlp.activation, gated=False)
    params = {"width": architecture.embedding.layer_input_size, "activation": function}
    return ModuleSpec(module=LayerInputBlock, params=params | {"norm": partial(build_norm, architecture)})


def mixer_spec(block: Mixer, layer: Layer, architecture: Architecture) -> tuple[str, ModuleSpec]:
    """The attribute of the layer, as Megatron-Core names it, and the module.

    Modules take the arguments ``(config, layer_number, *, block, pg_collection)`` and are called as
    ``(hidden_states, *, rotary_pos_emb, packed_seq_params)``; they return an output and a bias to add, or None.
    ``hidden_states`` and the output are [T, 1, H], or [T / tp, 1, H] under sequence parallelism.
    """
    if isinstance(block, Attention):
        return "self_attention", attention_spec(block, layer, architecture)
    attribute, module = MIXERS[block.kind]
    return attribute, ModuleSpec(
        module=multiplied(module, *block.input_and_output_multipliers), params={"block": block}
    )


def attention_spec(block: Attention, layer: Layer, architecture: Architecture) -> ModuleSpec:
    if isinstance(block, LatentAttention):
        return ModuleSpec(module=MultiLatentAttention, params={"block": block, "family": architecture.family})
    params = {
        "block": block,
        "norm": norm_spec(architecture),
        "rotary_columns": rotary_columns(architecture, block),
        "lends_keys": layer.number in {other.attention.key_source for other in architecture.layers if other.attention},
    }
    return ModuleSpec(module=multiplied(PackedSelfAttention, *block.input_and_output_multipliers), params=params)


def mlp_modules(mlp: Mlp, *, moe: bool, limit: float | None) -> MLPSubmodules:
    """``MoeBlock`` configures the biases of experts; ``limit`` is that of SwiGLU in the layer."""
    kinds = (ColumnParallelLinear, RowParallelLinear)
    fc1, fc2 = kinds if moe else (with_bias(kind, mlp.mlp_bias) for kind in kinds)
    return MLPSubmodules(linear_fc1=fc1, linear_fc2=fc2, activation_func=activation_spec(mlp, limit))


def activation_spec(mlp: Mlp, limit: float | None) -> ModuleSpec | type:
    if mlp.activation == "xielu":
        return Xielu
    function = activation_function(mlp.activation, gated=mlp.gated, multiplier=mlp.mlp_multipliers[0], limit=limit)
    return ModuleSpec(module=Activation, params={"function": function})
