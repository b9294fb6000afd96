"""The args in a Megatron-LM checkpoint, from which its loader builds the model, and what it does not support.

Names and meaning follow Megatron-LM core_v0.16.1: ``megatron/training/arguments.py`` defines the args,
``load_args_from_checkpoint`` in ``checkpointing.py`` restores some of them, ``gpt_builders.py`` builds the model.
"""

from __future__ import annotations

import shlex
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from isthmus.config.dialects.megatron.known_args import is_default, words_of
from isthmus.convert.legacy.legacy_layout import LegacyLayout
from isthmus.families.architecture import SETTINGS, Architecture, Dropout
from isthmus.families.blocks.feed_forward import Experts
from isthmus.families.blocks.rotary import RopeScaling

ROPE_SCALING = RopeScaling(kind="llama3", factor=8.0)
"""The scaling of ``--use-rope-scaling``; no release passes ``--rope-scaling-factor`` to the model."""
YARN = (4096, 32.0, 1.0)
"""Original context of YaRN, ``beta_fast`` and ``beta_slow``; there are no flags for them."""
_NO_DROPOUT = Dropout()
CLAMPED_SWIGLU: dict[str, bool | float] = {
    "quick_geglu": True,
    "activation_func_clamp_value": 7.0,
    "glu_linear_offset": 1.0,
}
_NOT_RESTORED = (
    *("layernorm_epsilon", "layernorm_zero_centered_gamma", "qk_layernorm", "window_size", "window_attn_skip_freq"),
    *("no_rope_freq", "use_rope_scaling", "softmax_type", "bias_gelu_fusion", "quick_geglu"),
    *("activation_func_clamp_value", "glu_linear_offset", "moe_shared_expert_gate", "moe_router_num_groups"),
    *("moe_router_group_topk", "moe_router_dtype", "multi_latent_attention", "q_lora_rank", "kv_lora_rank"),
    *("qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim", "rope_type", "rotary_scaling_factor", "mscale"),
    *("mscale_all_dim", "mtp_num_layers"),
)
"""Args that ``load_args_from_checkpoint`` does not restore, among them ``layernorm_1p``, which it looks up under its
older name."""
_UNSUPPORTED: tuple[tuple[str, str | tuple[str, ...] | Callable[[Architecture], bool]], ...] = (
    ("score heads", "score_head"),
    ("layers of the form '{0.pattern.form}'", "form"),
    ("layers without attention", "mixers"),
    ("a gate of attention", ("attention_gate", "head_gate")),
    ("limits of SwiGLU", ("swiglu_limits", "moe.swiglu_limits")),
    ("norms without a bias", lambda arch: arch.norm.normalization == "LayerNorm" and not arch.norm.norm_bias),
    ("norms without weights", "norm_weight"),
    ("a norm of the embeddings", "embedding_norm"),
    ("a query and key norm over all heads together", lambda arch: arch.attention.qk_norm_over == "projection"),
    ("query and key norms of their own for each head", lambda arch: arch.attention.qk_norm_over == "each_head"),
    (
        "query and key norms after the rotation",
        lambda arch: arch.attention.qk_norm and arch.attention.qk_norm_after_rotation,
    ),
    ("clip_qkv={0.attention.clip_qkv:g}", "clip_qkv"),
    ("reversed rotations", "rotary_reversed"),
    ("a table of positions with {0.embedding.position_offset} rows before the first", "position_offset"),
    ("a bias of the output layer", lambda arch: arch.head.output_bias and not arch.head.score_head),
    (
        "a different norm epsilon in latent attention",
        lambda arch: arch.latent is not None and arch.latent.norm_epsilon != arch.norm.norm_epsilon,
    ),
    (
        "rotary pairs of halves in latent attention",
        lambda arch: arch.latent is not None and not arch.rotary.rotary_interleaved,
    ),
    ("rope scaling '{0.rotary.rope_scaling.kind}' with these numbers", lambda arch: not _rope_is_supported(arch)),
    ("biases of queries in latent attention", lambda arch: arch.latent is not None and arch.attention.qkv_bias),
    ("selected keys", lambda arch: arch.setting("indexer") is not None),
    ("other attention sizes in layers with a window", lambda arch: arch.windows.window_attention is not None),
    (
        "values of another width than keys",
        lambda arch: arch.latent is None and arch.attention.value_width != arch.attention.kv_channels,
    ),
    ("value_multiplier={0.attention.value_multiplier:g}", "value_multiplier"),
    ("a different rotary base in layers with a window", "window_rotary_base"),
    (
        "attention_scale={0.attention.attention_scale:g}",
        lambda arch: arch.attention.attention_scale not in (None, arch.attention.kv_channels**-0.5),
    ),
    ("attention in chunks", "window_kind"),
    ("queries and keys divided by their root mean square", "qk_rms"),
    ("experts with weighted inputs", "moe.weighs_inputs"),
    ("the mean of routed and shared experts", "moe.shared_mean"),
    ("values divided by their root mean square", "value_norm"),
    ("values that are keys", "values_are_keys"),
    ("layers that share keys", "key_sharing_layers"),
    ("inputs of their own for each layer", "layer_input_size"),
    ("layers with a scalar", "layer_scalars"),
    ("queries that grow with their position", "query_scaling"),
    ("attention_softcap={0.attention.attention_softcap:g}", "attention_softcap"),
    ("biases in some linear layers only", lambda arch: _has_biases(arch) is None),
    ("the activation {0.mlp.activation} in this model", lambda arch: _activation_args(arch) is None),
    ("this expert routing", lambda arch: arch.moe is not None and _routing_args(arch.moe) is None),
    ("a bias of the sum of the experts' outputs", "moe.output_bias"),
    ("embedding_multiplier={0.embedding.embedding_multiplier:g}", "embedding_multiplier"),
    ("residual_multiplier={0.pattern.residual_multiplier:g}", "residual_multiplier"),
    ("logits_multiplier={0.head.logits_multiplier:g}", "logits_multiplier"),
    ("logits_softcap={0.head.logits_softcap:g}", "logits_softcap"),
    ("attention without positions", lambda arch: arch.embedding.position == "none"),
    ("MTP layers whose hidden state comes first", "mtp_hidden_first"),
    ("layers without a feed-forward block", "layers_without_mlp"),
    ("multipliers of attention", "attention_multipliers"),
    ("multipliers of feed-forward blocks", "mlp_multipliers"),
    ("routed experts of another width than the hidden size", "moe.latent_size"),
    ("router weights that are always float32", "moe.router_float32"),
    ("moe.normalize_min={0.moe.normalize_min:g}", lambda arch: arch.moe is not None and _lower_bound_matters(arch.moe)),
    ("an offset of the router's divisor", "moe.normalize_offset"),
)
"""Features and how a model has one: settings that are not the default, or a function."""


def _lower_bound_matters(moe: Experts) -> bool:
    """Whether sums of scores can be as small as the lower bound, which Megatron-LM has at 1e-20."""
    return moe.score == "sigmoid" and moe.normalize and moe.normalize_min != 1e-20


def megatron_args(
    arch: Architecture,
    dtype: torch.dtype,
    *,
    layout: LegacyLayout | None = None,
    padded_vocab_size: int | None = None,
    spelling: str = "te",
    dropout: Dropout = _NO_DROPOUT,
) -> Namespace:
    """``layout`` (None: ``torch_dist``) and ``spelling`` are those of a legacy checkpoint.

    ``padded_vocab_size`` is the number of embedding rows over all ranks; None is without padding.
    """
    format_args: dict[str, Any] = {"ckpt_format": "torch_dist" if layout is None else "torch"}
    if layout is not None and arch.moe is not None:
        format_args["moe_grouped_gemm"] = spelling == "te"  # torch_dist loads with and without it
    layout = layout or LegacyLayout()
    first, last = layout.outer_stages(arch.num_layers) or (None, None)
    return Namespace(
        **model_args(arch) | {"attention_dropout": dropout.attention, "hidden_dropout": dropout.hidden},
        **format_args,
        transformer_impl="transformer_engine" if spelling == "te" else "local",
        iteration=0,
        consumed_train_samples=0,
        skipped_train_samples=0,
        consumed_valid_samples=0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
        decoder_first_pipeline_num_layers=first,
        decoder_last_pipeline_num_layers=last,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        context_parallel_size=1,
        world_size=len(layout.files()),
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        params_dtype=dtype,
        # A tokenizer type here would override the user's.
        tokenizer_type=None,
        tokenizer_model=None,
        vocab_size=arch.vocab_size,
        padded_vocab_size=padded_vocab_size or arch.vocab_size,
        make_vocab_size_divisible_by=1,
    )


def model_args(arch: Architecture) -> dict[str, Any]:
    """Megatron-LM's args of the model, without its ``unsupported_features``."""
    biases = bool(_has_biases(arch))
    layers = range(arch.num_layers)
    windows = [int(arch.windows.of(layer) is not None) for layer in layers]
    args: dict[str, Any] = {
        "num_layers": arch.num_layers,
        "hidden_size": arch.hidden_size,
        "ffn_hidden_size": arch.mlp.ffn_hidden_size,
        "num_attention_heads": arch.attention.num_attention_heads,
        "group_query_attention": arch.latent is None
        and arch.attention.num_query_groups != arch.attention.num_attention_heads,
        "num_query_groups": arch.attention.num_query_groups,
        "kv_channels": arch.attention.kv_channels,
        "seq_length": arch.max_position_embeddings,
        "max_position_embeddings": arch.max_position_embeddings,
        "normalization": arch.norm.normalization,
        "layernorm_epsilon": arch.norm.norm_epsilon,
        "norm_epsilon": arch.norm.norm_epsilon,  # its name before 0.16
        "layernorm_zero_centered_gamma": arch.norm.norm_zero_centered,
        "apply_layernorm_1p": arch.norm.norm_zero_centered,  # its name before 0.16
        "add_bias_linear": biases,
        "add_qkv_bias": biases or arch.attention.qkv_bias,
        "qk_layernorm": arch.attention.qk_norm or arch.latent is not None,
        "apply_query_key_layer_scaling": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "softmax_type": "learnable" if arch.attention.attention_sinks else "vanilla",
        "window_size": None if arch.windows.sliding_window is None else (arch.windows.sliding_window - 1, 0),
        "window_attn_skip_freq": windows if len(set(windows)) > 1 else None,
        "init_method_std": arch.init_std,
        "squared_relu": False,
        "swiglu": False,
        **(_activation_args(arch) or {}),
        **_position_args(arch),
        "untie_embeddings_and_output_weights": not arch.head.tie_embeddings,
        "mtp_num_layers": arch.pattern.mtp_layers or None,
        "num_experts": None,
        **_latent_args(arch),
    }
    if (moe := arch.moe) is not None:
        moe_layers = [int(layer.experts is not None) for layer in arch.layers]
        args |= {
            "num_experts": moe.num_experts,
            # With a list, each layer has separate checkpoint keys.
            "moe_layer_freq": 1 if all(moe_layers) else moe_layers,
            "moe_ffn_hidden_size": moe.ffn_hidden_size,
            "moe_router_topk": moe.top_k,
            "moe_shared_expert_intermediate_size": moe.shared_ffn_hidden_size or None,
            "moe_shared_expert_gate": moe.shared_gate,
            "moe_router_topk_scaling_factor": moe.scaling_factor if moe.scaling_factor != 1 else None,
            "moe_router_enable_expert_bias": moe.expert_bias,
            "moe_router_dtype": "fp32" if moe.router_float32 else None,
            **(_routing_args(moe) or {}),
        }
    return args


def _has_biases(arch: Architecture) -> bool | None:
    """True if all linear layers have biases, False if none except perhaps QKV, None otherwise."""
    biases = {arch.attention.proj_bias} | ({arch.mlp.mlp_bias} if arch.moe is None or arch.moe.dense_layers else set())
    if arch.moe is not None:
        biases |= {arch.moe.expert_mlp_bias, arch.moe.router_bias}
    if biases == {True}:
        return True if arch.attention.qkv_bias else None
    return False if biases == {False} else None


def _activation_args(arch: Architecture) -> dict[str, Any] | None:
    """None if Megatron-LM has no option for the activation."""
    fused = _has_biases(arch) and arch.moe is None
    match arch.mlp.activation, arch.mlp.gated:
        case "silu", True:
            return {"swiglu": True}
        case "clamped_swiglu", True:
            return {"swiglu": False, **CLAMPED_SWIGLU}
        case "gelu", False:
            return {"swiglu": False, "bias_gelu_fusion": False}
        case "gelu_tanh", False if fused:
            return {"swiglu": False, "bias_gelu_fusion": True}  # the fused kernel uses the tanh approximation
    return None


def _position_args(arch: Architecture) -> dict[str, Any]:
    scaling = arch.rotary.rope_scaling
    skipped = [int(layer in arch.pattern.unrotated_layers) for layer in range(arch.num_layers)]
    return {
        "position_embedding_type": "rope" if arch.embedding.position == "rope" else "learned_absolute",
        "add_position_embedding": True,
        "use_rotary_position_embeddings": False,
        "rotary_base": int(arch.rotary.rotary_base)
        if arch.rotary.rotary_base.is_integer()
        else arch.rotary.rotary_base,
        "rotary_percent": arch.rotary.rotary_percent,
        "rotary_interleaved": arch.rotary.rotary_interleaved and arch.latent is None,
        "no_rope_freq": skipped if any(skipped) else None,
        "use_rope_scaling": scaling is not None and scaling.kind == "llama3",
        "rope_scaling_factor": scaling.factor if scaling and scaling.kind == "llama3" else ROPE_SCALING.factor,
        "rotary_seq_len_interpolation_factor": scaling.factor if scaling and scaling.kind == "linear" else None,
    }


def _latent_args(arch: Architecture) -> dict[str, Any]:
    if (mla := arch.latent) is None:
        return {"multi_latent_attention": False}
    scaling = arch.rotary.rope_scaling
    args: dict[str, Any] = {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "rope" if scaling is None else "yarn",
    }
    if scaling is not None:
        weights = _yarn_mscales(scaling) or (1.0, 0.0)
        args |= {"rotary_scaling_factor": scaling.factor, "mscale": weights[0], "mscale_all_dim": weights[1]}
        args |= {"original_max_position_embeddings": scaling.original_max_position_embeddings}
        args |= {"beta_fast": scaling.beta_fast, "beta_slow": scaling.beta_slow}
    return args


def _yarn_mscales(scaling: RopeScaling) -> tuple[float, float] | None:
    """``mscale`` and ``mscale_all_dim`` with the same effect in Megatron-LM; None if there are none.

    Megatron-LM multiplies cosines by the ratio of their effects, with 1 for a missing ``mscale``.
    """
    if scaling.attention_factor is not None:
        return None
    if scaling.mscale and scaling.mscale_all_dim:
        return scaling.mscale, scaling.mscale_all_dim
    return None if scaling.mscale_all_dim else (1.0, 0.0)


def _routing_args(moe: Experts) -> dict[str, Any] | None:
    """None if Megatron-LM has no option for this routing."""
    if moe.router_norm or moe.expert_gains or moe.branch_norms:
        return None
    grouped = moe.num_groups > 1
    groups: dict[str, Any] = {"moe_router_num_groups": None, "moe_router_group_topk": None}
    if grouped:
        # Megatron-LM scores a group by the sum of its topk/group_topk best experts.
        if moe.top_k // moe.group_top_k != (1 if moe.group_score == "max" else 2):
            return None
        groups = {"moe_router_num_groups": moe.num_groups, "moe_router_group_topk": moe.group_top_k}
    if moe.score == "sigmoid":
        if moe.normalize != (moe.top_k > 1):
            return None
        return {"moe_router_score_function": "sigmoid", "moe_router_pre_softmax": False, **groups}
    if moe.expert_bias or moe.score == "sparsemixer":
        return None
    # Softmax over the chosen experts equals normalized softmax over all, but then groups are chosen by logits.
    after = moe.score == "softmax_of_chosen" or moe.normalize
    if after and (grouped or moe.top_k == 1):
        return None
    return {"moe_router_score_function": "softmax", "moe_router_pre_softmax": not after, **groups}


def unsupported_features(arch: Architecture) -> list[str]:
    """Features that Megatron-LM 0.16.1 has no option for."""

    def has(feature: str | tuple[str, ...] | Callable[[Architecture], bool]) -> bool:
        if callable(feature):
            return feature(arch)
        names = (feature,) if isinstance(feature, str) else feature
        return any(arch.setting(name) not in (None, SETTINGS[name]) for name in names)

    return [text.format(arch) for text, feature in _UNSUPPORTED if has(feature)]


def required_flags(arch: Architecture) -> list[str]:
    """Flags beside ``--use-checkpoint-args``, quoted for a shell."""
    args = model_args(arch)
    return [
        shlex.join(words_of(name, args[name]))
        for name in _NOT_RESTORED
        if name in args and not is_default(name, args[name])
    ]


def _rope_is_supported(arch: Architecture) -> bool:
    if (scaling := arch.rotary.rope_scaling) is None:
        return True
    if arch.latent is None:
        return scaling == ROPE_SCALING
    fixed = (scaling.kind, scaling.original_max_position_embeddings, scaling.beta_fast, scaling.beta_slow)
    return fixed == ("yarn", *YARN) and scaling.truncate and _yarn_mscales(scaling) is not None
