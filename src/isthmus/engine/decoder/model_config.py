"""The configuration of the decoder of a model in a parallel layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from isthmus.config.schema.moe import MoeConfig
from isthmus.config.schema.parallel import ParallelConfig
from isthmus.config.schema.train import TrainConfig
from isthmus.engine.attention.backends.registry import AttentionNeeds
from isthmus.engine.attention.backends.selection import select_backend
from isthmus.engine.decoder_config import BackendName, DecoderConfig
from isthmus.engine.parallel.pipeline_layout import pipeline_layout
from isthmus.families.architecture import Architecture, Dropout
from isthmus.families.blocks.attention import Attention

_DEFAULTS = (ParallelConfig(), TrainConfig(), MoeConfig(), Dropout())
_CPU = torch.device("cpu")


def transformer_config(
    architecture: Architecture,
    parallel: ParallelConfig = _DEFAULTS[0],
    *,
    dtype: torch.dtype,
    device: torch.device = _CPU,
    train: TrainConfig = _DEFAULTS[1],
    moe: MoeConfig = _DEFAULTS[2],
    mtp: bool = False,
    dropout: Dropout = _DEFAULTS[3],
    attention: BackendName | None = None,
    vocab_rows: int | None = None,
) -> DecoderConfig:
    """``train`` sets recomputation, the MTP loss weight and the seed of dropout; ``mtp`` builds MTP layers.

    ``attention`` None selects an attention backend without comparing it with float32.
    """
    if attention is None:
        needs = attention_needs(architecture, parallel, dtype=dtype, device=device, dropout=dropout)
        attention = select_backend(train.attention, *needs).name
    return DecoderConfig(
        attention=attention,
        experts=moe,
        device=device,
        num_layers=architecture.num_layers,
        hidden_size=architecture.hidden_size,
        ffn_hidden_size=architecture.mlp.ffn_hidden_size,
        normalization=architecture.norm.normalization,
        layernorm_epsilon=architecture.norm.norm_epsilon,
        layernorm_zero_centered_gamma=architecture.norm.norm_zero_centered,
        add_bias_linear=False,  # set by each spec
        gated_linear_unit=architecture.mlp.gated,
        activation_func=F.silu if architecture.mlp.activation == "silu" else F.gelu,
        use_te_activation_func=True,  # lets a spec choose its activation module; does not need TransformerEngine
        attention_dropout=dropout.attention,
        hidden_dropout=dropout.hidden,
        embedding_dropout=dropout.embedding,
        seed=train.seed,
        label_smoothing=train.label_smoothing,
        neftune_alpha=train.neftune_alpha,
        vocab_rows=vocab_rows,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        calculate_per_token_loss=True,
        perform_initialization=False,
        **_attention_settings(architecture),
        **_expert_settings(architecture),
        **_parallel_settings(architecture, parallel, architecture.pattern.mtp_layers if mtp else 0, train),
        **_recompute_settings(train),
    )


def attention_needs(
    architecture: Architecture, parallel: ParallelConfig, *, dtype: torch.dtype, device: torch.device, dropout: Dropout
) -> tuple[AttentionNeeds, ...]:
    """What the attention backend of a rank has to compute, in each kind of layer."""

    def needs(attention: Attention) -> AttentionNeeds:
        heads = attention.num_attention_heads // parallel.tp
        groups = max(1, attention.kernel_groups // parallel.tp)
        return AttentionNeeds(
            device="cpu" if device.type == "cpu" else "cuda",
            dtype=dtype,
            groups=groups,
            repeat=heads // groups,
            key_width=attention.kv_channels,
            value_width=attention.value_width,
            scale=attention.attention_scale,
            window=architecture.windows.sliding_window is not None,
            softcap=attention.attention_softcap,
            sinks=attention.attention_sinks,
            dropout=dropout.attention > 0,
            cp=parallel.cp > 1,
        )

    return tuple(dict.fromkeys(map(needs, architecture.attention_kinds)))


def _attention_settings(architecture: Architecture) -> dict[str, Any]:
    return {
        "num_attention_heads": architecture.attention.num_attention_heads,
        "num_query_groups": architecture.attention.num_query_groups,
        "kv_channels": architecture.attention.kv_channels,
        "rotary_interleaved": architecture.rotary.rotary_interleaved,
        "qk_layernorm": architecture.attention.qk_norm,
        "add_qkv_bias": architecture.attention.qkv_bias,
        "softmax_scale": architecture.attention.attention_scale,
        "softmax_type": "learnable" if architecture.attention.attention_sinks else "vanilla",
        "window_size": None
        if architecture.windows.sliding_window is None
        else (architecture.windows.sliding_window - 1, 0),
        "window_attn_skip_freq": [
            int(architecture.windows.of(layer) is not None) for layer in range(architecture.num_layers)
        ],
    }


def _expert_settings(architecture: Architecture) -> dict[str, Any]:
    """Settings of Megatron-Core's modules and checkpoints for a model with experts. Isthmus has its own router."""
    if (moe := architecture.moe) is None:
        return {}
    layers = [int(layer.experts is not None) for layer in architecture.layers]
    return {
        "samples_experts": moe.score == "sparsemixer",
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.top_k,
        "moe_ffn_hidden_size": moe.ffn_hidden_size,
        "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
        # A list means that layers differ, and gives each layer its own keys in a checkpoint.
        "moe_layer_freq": 1 if all(layers) else layers,
        "moe_router_dtype": "fp32",
        "moe_router_pre_softmax": True,  # its router is not used; without the switch it rejects a top_k of 1
    }


def _parallel_settings(
    architecture: Architecture, parallel: ParallelConfig, mtp_layers: int, train: TrainConfig
) -> dict[str, Any]:
    layout = pipeline_layout(architecture.num_layers, parallel.pp, parallel.vpp, mtp_layers=mtp_layers)
    return {
        "tensor_model_parallel_size": parallel.tp,
        "context_parallel_size": parallel.cp,
        "pipeline_model_parallel_size": parallel.pp,
        "expert_model_parallel_size": parallel.ep,
        "expert_tensor_parallel_size": parallel.expert_tp,
        "pipeline_model_parallel_layout": layout,
        "virtual_pipeline_model_parallel_size": parallel.vpp if parallel.vpp > 1 else None,
        # With vpp, activations and gradients go between the same two ranks; one batch of P2P calls would mix them up.
        "overlap_p2p_comm": parallel.vpp > 1,
        "batch_p2p_comm": parallel.vpp == 1,
        "batch_p2p_sync": False,  # against a defect of old versions of torch; a wait orders the streams
        # With vpp an output is sent during the next computation. Gloo would read memory that is already reused.
        "deallocate_pipeline_outputs": parallel.vpp == 1,
        "sequence_parallel": parallel.sequence_parallel,
        "mtp_num_layers": mtp_layers or None,
        "mtp_loss_scaling_factor": train.mtp_loss_weight if mtp_layers else None,
    }


def _recompute_settings(train: TrainConfig) -> dict[str, Any]:
    full = train.recompute == "full"
    return {
        "recompute_granularity": "full" if full else None,
        "recomputed": frozenset(train.recompute_modules if train.recompute == "selective" else ()),
        # "uniform" recomputes all layers, "block" the first layers of a stage.
        "recompute_method": ("uniform" if train.recompute_layers is None else "block") if full else None,
        "recompute_num_layers": (train.recompute_layers or 1) if full else None,
    }
