"""What Megatron-LM core_v0.16.1 supports of a model, and the flags it needs beside ``--use-checkpoint-args``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from isthmus.convert.legacy.megatron_args import (
    ROPE_SCALING,
    YARN,
    activation_args,
    has_biases,
    model_args,
    routing_args,
    yarn_mscales,
)
from isthmus.families.architecture import Architecture

FLAGS_NOT_RESTORED: dict[str, tuple[str, Any]] = {
    "layernorm_epsilon": ("--norm-epsilon", 1e-5),
    "layernorm_zero_centered_gamma": ("--apply-layernorm-1p", False),
    "qk_layernorm": ("--qk-layernorm", False),
    "window_size": ("--window-size", None),
    "window_attn_skip_freq": ("--window-attn-skip-freq", None),
    "no_rope_freq": ("--no-rope-freq", None),
    "use_rope_scaling": ("--use-rope-scaling", False),
    "softmax_type": ("--softmax-type", "vanilla"),
    "bias_gelu_fusion": ("--no-bias-gelu-fusion", True),
    "quick_geglu": ("--quick-geglu", False),
    "activation_func_clamp_value": ("--activation-func-clamp-value", None),
    "glu_linear_offset": ("--glu-linear-offset", 0.0),
    "moe_shared_expert_gate": ("--moe-shared-expert-gate", False),
    "moe_router_num_groups": ("--moe-router-num-groups", None),
    "moe_router_group_topk": ("--moe-router-group-topk", None),
    "moe_router_dtype": ("--moe-router-dtype", None),
    "multi_latent_attention": ("--multi-latent-attention", False),
    "q_lora_rank": ("--q-lora-rank", None),
    "kv_lora_rank": ("--kv-lora-rank", 32),
    "qk_head_dim": ("--qk-head-dim", 128),
    "qk_pos_emb_head_dim": ("--qk-pos-emb-head-dim", 64),
    "v_head_dim": ("--v-head-dim", 128),
    "rope_type": ("--rope-type", None),
    "rotary_scaling_factor": ("--rotary-scaling-factor", 1.0),
    "mscale": ("--mscale", 1.0),
    "mscale_all_dim": ("--mscale-all-dim", 0.0),
    "mtp_num_layers": ("--mtp-num-layers", None),
}
"""Flags and defaults of args that ``load_args_from_checkpoint`` does not restore, among them ``layernorm_1p``, which it
looks up under its older name."""
_UNSUPPORTED: tuple[tuple[str, Callable[[Architecture], bool]], ...] = (
    ("layers of the form '{0.form}'", lambda arch: arch.form != "pre"),
    ("norms without a bias", lambda arch: arch.normalization == "LayerNorm" and not arch.norm_bias),
    ("a query and key norm over all heads together", lambda arch: arch.qk_norm and arch.qk_norm_over == "projection"),
    (
        "a different norm epsilon in latent attention",
        lambda arch: arch.mla is not None and arch.mla.norm_epsilon != arch.norm_epsilon,
    ),
    ("rotary pairs of halves in latent attention", lambda arch: arch.mla is not None and not arch.rotary_interleaved),
    ("rope scaling '{0.rope_scaling.kind}' with these numbers", lambda arch: not _rope_is_supported(arch)),
    ("a different rotary base in layers with a window", lambda arch: arch.window_rotary_base is not None),
    ("attention_scale={0.attention_scale:g}", lambda arch: arch.attention_scale not in (None, arch.kv_channels**-0.5)),
    ("attention_softcap={0.attention_softcap:g}", lambda arch: arch.attention_softcap is not None),
    ("biases in some linear layers only", lambda arch: has_biases(arch) is None),
    ("the activation {0.activation} in this model", lambda arch: activation_args(arch) is None),
    ("this expert routing", lambda arch: arch.moe is not None and routing_args(arch.moe) is None),
    ("embedding_multiplier={0.embedding_multiplier:g}", lambda arch: arch.embedding_multiplier != 1),
    ("residual_multiplier={0.residual_multiplier:g}", lambda arch: arch.residual_multiplier != 1),
    ("logits_multiplier={0.logits_multiplier:g}", lambda arch: arch.logits_multiplier != 1),
    ("logits_softcap={0.logits_softcap:g}", lambda arch: arch.logits_softcap is not None),
)


def unsupported_features(arch: Architecture) -> list[str]:
    """Features that Megatron-LM 0.16.1 has no option for."""
    return [text.format(arch) for text, has in _UNSUPPORTED if has(arch)]


def required_flags(arch: Architecture) -> list[str]:
    """Flags beside ``--use-checkpoint-args``, quoted for a shell."""
    args = model_args(arch)
    return [
        _flag(flag, args[name])
        for name, (flag, default) in FLAGS_NOT_RESTORED.items()
        if name in args and args[name] != default
    ]


def _flag(flag: str, value: Any) -> str:
    match value:
        case bool():
            return flag
        case list():
            return f"{flag} '[{','.join(map(str, value))}]'"
        case tuple():
            return f"{flag} {','.join(map(str, value))}"
        case _:
            return f"{flag} {value}"


def _rope_is_supported(arch: Architecture) -> bool:
    if (scaling := arch.rope_scaling) is None:
        return True
    if arch.mla is None:
        return scaling == ROPE_SCALING
    fixed = (scaling.kind, scaling.original_max_position_embeddings, scaling.beta_fast, scaling.beta_slow)
    return fixed == ("yarn", *YARN) and scaling.truncate and yarn_mscales(scaling) is not None
