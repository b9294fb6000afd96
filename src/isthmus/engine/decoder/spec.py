"""What each layer of a decoder is made of: plain PyTorch modules in place of TransformerEngine's and Apex's."""

from __future__ import annotations

from functools import partial

from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from torch import nn

from isthmus.config.schema.moe import MoeConfig
from isthmus.engine.attention.multi_latent_attention import LatentAttention
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
from isthmus.families.architecture import Architecture, Mixer

MIXERS: dict[Mixer, tuple[str, type]] = {
    "gated_delta_net": ("self_attention", GatedDeltaNet),
    "kimi_delta_attention": ("self_attention", KimiDeltaAttention),
    "mamba2": ("mixer", Mamba2Mixer),
    "mamba": ("mixer", MambaMixer),
    "short_convolution": ("mixer", ShortConvolutionMixer),
}
"""Attribute of the layer and class of each mixer other than attention, see :func:`mixer_spec`."""


def build_layer(architecture: Architecture, config: DecoderConfig, layer: int) -> DecoderLayer:
    """``layer`` counts from 0 in the whole model; MTP layers follow the last layer."""
    spec = layer_spec(architecture, layer, config.experts)
    return DecoderLayer(config, spec, layer + 1, ProcessGroupCollection.use_mpu_process_groups())


def build_norm(architecture: Architecture, config: DecoderConfig) -> nn.Module:
    """A norm of hidden states."""
    shape = {"hidden_size": config.hidden_size, "eps": config.layernorm_epsilon}
    norm: nn.Module = build_module(norm_spec(architecture), config=config, **shape)
    return norm


def norm_spec(architecture: Architecture) -> ModuleSpec | type:
    with_weight = architecture.norm_weight
    if architecture.normalization == "RMSNorm":
        return RMSNorm if with_weight else ModuleSpec(module=RMSNorm, params={"weight": False})
    params = {"bias": architecture.norm_bias and with_weight, "weight": with_weight}
    return ModuleSpec(module=LayerNorm, params=params)


def layer_spec(architecture: Architecture, layer: int, settings: MoeConfig) -> LayerSpec:
    mixers, moe, norm = architecture.mixers_of(layer), architecture.is_moe(layer), partial(build_norm, architecture)
    modules = partial(mlp_modules, architecture, moe=moe)
    shared = modules(limit=architecture.swiglu_limit(layer, routed=False))
    experts = {"moe": architecture.moe, "settings": settings, "layer": layer, "norm": norm, "shared": shared}
    width = architecture.mlp_width(layer)
    mlp = ModuleSpec(
        module=MoeBlock if moe else multiplied(DenseMlp, 1.0, architecture.mlp_multipliers[1]),
        params=experts if moe else {"width": width} if width != architecture.ffn_hidden_size else {},
        submodules=modules(limit=architecture.swiglu_limit(layer, routed=True)) if moe else shared,
    )
    mlp_has_norms = moe and architecture.moe is not None and architecture.moe.branch_norms
    return LayerSpec(
        form=architecture.form_of(layer),
        norm=norm,
        mixers=dict(mixer_spec(mixer, architecture) for mixer in mixers),
        mlp=None if layer in architecture.layers_without_mlp else mlp,
        residual_multiplier=architecture.residual_multiplier,
        # Checkpoint keys follow TransformerEngine's fused modules, so that every spec can load them.
        fused_norms=fused_norms(mixers, latent=architecture.mla is not None, moe=moe),
        mlp_has_norms=mlp_has_norms,
        scalar=architecture.layer_scalars,
        input=layer_input_spec(architecture),
    )


def layer_input_spec(architecture: Architecture) -> ModuleSpec | None:
    """What adds a layer's own input of each token; None if layers have none."""
    if not architecture.layer_input_size:
        return None
    function = activation_function(architecture.activation, gated=False)
    params = {"width": architecture.layer_input_size, "activation": function}
    return ModuleSpec(module=LayerInputBlock, params=params | {"norm": partial(build_norm, architecture)})


def mixer_spec(kind: Mixer, architecture: Architecture) -> tuple[str, ModuleSpec]:
    """The attribute of the layer, as Megatron-Core names it, and the module.

    Modules take the arguments ``(config, layer_number, *, architecture, pg_collection)`` and are called as
    ``(hidden_states, *, rotary_pos_emb, packed_seq_params)``; they return an output and a bias to add, or None.
    ``hidden_states`` and the output are [T, 1, H], or [T / tp, 1, H] under sequence parallelism.
    """
    if kind == "attention":
        return "self_attention", attention_spec(architecture)
    attribute, module = MIXERS[kind]
    if kind == "mamba2" and architecture.mamba2 is not None:
        module = multiplied(module, *architecture.mamba2.multipliers)
    return attribute, ModuleSpec(module=module, params={"architecture": architecture})


def attention_spec(architecture: Architecture) -> ModuleSpec:
    if architecture.mla is not None:
        return ModuleSpec(module=LatentAttention, params={"architecture": architecture})
    params = {"architecture": architecture, "norm": norm_spec(architecture)}
    return ModuleSpec(module=multiplied(PackedSelfAttention, *architecture.attention_multipliers), params=params)


def mlp_modules(architecture: Architecture, *, moe: bool, limit: float | None) -> MLPSubmodules:
    """``MoeBlock`` configures the biases of experts; ``limit`` is that of SwiGLU in the layer."""
    kinds = (ColumnParallelLinear, RowParallelLinear)
    fc1, fc2 = kinds if moe else (with_bias(kind, architecture.mlp_bias) for kind in kinds)
    return MLPSubmodules(
        linear_fc1=fc1,
        linear_fc2=fc2,
        activation_func=activation_spec(architecture, limit),
    )


def activation_spec(architecture: Architecture, limit: float | None) -> ModuleSpec | type:
    if architecture.activation == "xielu":
        return Xielu
    function = activation_function(
        architecture.activation,
        gated=architecture.gated,
        multiplier=architecture.mlp_multipliers[0],
        limit=limit,
    )
    return ModuleSpec(module=Activation, params={"function": function})
