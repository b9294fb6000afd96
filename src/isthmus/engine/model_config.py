"""The description of a model and its layout, in Megatron-Core's terms."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from isthmus.config.schema.moe import MoeConfig
from isthmus.config.schema.parallel import ParallelConfig
from isthmus.config.schema.train import TrainConfig
from isthmus.engine.parallel.pipeline_layout import pipeline_layout
from isthmus.families.architecture import Architecture

_DEFAULTS = (ParallelConfig(), TrainConfig(), MoeConfig())


@dataclass
class DecoderConfig(TransformerConfig):
    """Megatron-Core's own description of a model and its layout, and what it does not know."""

    experts: MoeConfig = field(default_factory=MoeConfig)


def padded_vocab_size(vocab_size: int, tp: int) -> int:
    """Rows of the embedding when each of ``tp`` ranks holds the same number; the added rows are zero and never used."""
    return math.ceil(vocab_size / tp) * tp


def transformer_config(
    architecture: Architecture,
    parallel: ParallelConfig = _DEFAULTS[0],
    *,
    dtype: torch.dtype,
    train: TrainConfig = _DEFAULTS[1],
    moe: MoeConfig = _DEFAULTS[2],
    mtp: bool = False,
) -> DecoderConfig:
    """The description of the model and its layout.

    Args:
        architecture: the model's.
        parallel: the layout.
        dtype: of weights and activations.
        train: which activations are recomputed, and the weight of the MTP loss.
        moe: dispatcher, capacity and losses of the experts.
        mtp: build the model's MTP layers.
    """
    full = train.recompute == "full"
    ahead = architecture.mtp_layers if mtp else 0
    return DecoderConfig(
        experts=moe,
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.ffn_hidden_size,
        num_attention_heads=architecture.num_attention_heads,
        num_query_groups=architecture.num_query_groups,
        kv_channels=architecture.kv_channels,
        normalization=architecture.normalization,
        layernorm_epsilon=architecture.norm_epsilon,
        layernorm_zero_centered_gamma=architecture.norm_zero_centered,
        rotary_interleaved=architecture.rotary_interleaved,
        qk_layernorm=architecture.qk_norm,
        add_qkv_bias=architecture.qkv_bias,
        add_bias_linear=False,  # each spec says its own
        gated_linear_unit=architecture.gated,
        activation_func=F.silu if architecture.activation == "silu" else F.gelu,
        use_te_activation_func=True,  # the switch that lets a spec bring its activation; no TransformerEngine in it
        softmax_scale=architecture.attention_scale,
        softmax_type="learnable" if architecture.attention_sinks else "vanilla",
        window_size=None if architecture.sliding_window is None else (architecture.sliding_window - 1, 0),
        window_attn_skip_freq=[int(architecture.window(layer) is not None) for layer in range(architecture.num_layers)],
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        tensor_model_parallel_size=parallel.tp,
        context_parallel_size=parallel.cp,
        pipeline_model_parallel_size=parallel.pp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
        pipeline_model_parallel_layout=pipeline_layout(architecture.num_layers, parallel.pp, parallel.vpp, ahead=ahead),
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        # Between two ranks activations and gradients go the same ways; exchanged at once they would be mixed up.
        overlap_p2p_comm=parallel.vpp > 1,
        batch_p2p_comm=parallel.vpp == 1,
        sequence_parallel=parallel.sequence_parallel,
        variable_seq_lengths=parallel.pp > 1,
        mtp_num_layers=ahead or None,
        mtp_loss_scaling_factor=train.mtp_loss_weight if ahead else None,
        **_expert_settings(architecture),
        moe_token_dispatcher_type="alltoall",  # variable lengths are refused with the default, experts or not
        calculate_per_token_loss=True,
        perform_initialization=False,
        recompute_granularity=None if train.recompute == "none" else train.recompute,
        recompute_modules=list(train.recompute_modules),
        # Layer by layer: those of "uniform" are all layers, those of "block" the first ones of a stage.
        recompute_method=("uniform" if train.recompute_layers is None else "block") if full else None,
        recompute_num_layers=(train.recompute_layers or 1) if full else None,
        # An output that is sent beside the next computation is let go before it has arrived; gloo then sends what else
        # has come to lie there.
        deallocate_pipeline_outputs=parallel.vpp == 1,
    )


def _expert_settings(architecture: Architecture) -> dict[str, Any]:
    """What Megatron-Core's modules and checkpoints ask of a model with experts; routing is Isthmus' own."""
    if (moe := architecture.moe) is None:
        return {}
    layers = [int(architecture.is_moe(layer)) for layer in range(architecture.num_layers)]
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        # A list says that layers are not alike, and each has its own keys in a checkpoint.
        "moe_layer_freq": 1 if all(layers) else layers,
        "moe_router_dtype": "fp32",
        "moe_router_pre_softmax": True,  # its router is not built; without the switch it refuses a top_k of 1
    }
