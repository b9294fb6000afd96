"""Ling 3.0: Kimi delta attention, the last layer of each group latent attention with a gate for each head."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Derived, Family, Fixed, Key, without
from isthmus.families.rules import decoder, delta_net, expert_tensors, mla, mtp
from isthmus.families.rules.decoder import HF_LAYER, flag, number
from isthmus.families.rules.delta_net import FULL, LINEAR
from isthmus.families.rules.rule import in_layers, renamed

_KIND: str = "kimi_delta_attention"
_HF = HF_LAYER + "attention."
_NAMES = {".self_attn.o_proj.": ".attention.dense.", ".self_attn.": ".attention."}
_BIAS = {"e_score_correction_bias": "expert_bias"}
_PARTS = ("q_proj", "Lk"), ("k_proj", "Lk"), ("v_proj", "Lv"), ("g_proj", "Lv"), ("b_proj", "Ln"), ("f_proj", "Lk")
_MIXER = delta_net.mixer_rules(
    delta_net.in_proj(*_PARTS, kind=_KIND, hf=_HF),
    norm="o_norm",
    out="o_proj",
    time_step="time_step",
    kind=_KIND,
    hf=_HF,
    convolutions=("q_conv1d", "k_conv1d", "v_conv1d"),
    low_rank=False,
)
_LATENT = in_layers("attention", *renamed((*mla.ATTENTION, mla.HEAD_GATE), _NAMES))
_LAYER = (*decoder.INPUT_NORM, *_LATENT, *_MIXER, *renamed(expert_tensors.MLP, _BIAS))


def _size(default: int, *names: str) -> Derived:
    """A size of the delta attention under several names, of which the first one counts."""

    def read(hf: Mapping[str, Any]) -> int:
        found: list[int | None] = [Key(name, default=None, optional=True).read(hf) for name in names]
        return next((size for size in found if size is not None), default)

    return Derived(read, lambda size, arch: dict.fromkeys(names, size))


def _layer_types(hf: Mapping[str, Any]) -> list[str]:
    group, layers = Key("layer_group_size", default=6).read(hf), range(Key("num_hidden_layers").read(hf))
    return [LINEAR if (layer + 1) % group else FULL for layer in layers]


def _bound(hf: Mapping[str, Any]) -> float | None:
    bound = hf.get("kda_lower_bound", -5.0)
    if not isinstance(bound, int | float) or not -100 <= bound < 0:
        raise DataError(f"config.json: kda_lower_bound must be a negative number from -100, got {bound!r:.60}.")
    return float(bound) if flag("kda_safe_gate", default=True).read(hf) else None


def _write_bound(bound: float | None, arch: Architecture) -> dict[str, Any]:
    return {"kda_safe_gate": bound is not None} | ({} if bound is None else {"kda_lower_bound": bound})


def _without_limits(key: str) -> Derived:
    """No limits of SwiGLU: null, or a list of 0 for each layer."""

    def read(hf: Mapping[str, Any]) -> tuple[float | None, ...]:
        given = hf.get(key) or []
        if not isinstance(given, list) or any(each not in (0, None) for each in given):
            raise UsageError(
                f"config.json: {key}={given!r:.60} is not supported for bailing_hybrid: transformers ignores it for "
                "this family, other implementations do not."
            )
        return ()

    def write(limits: tuple[float | None, ...], arch: Architecture) -> dict[str, Any]:
        if limits:
            raise UsageError(
                f"{arch.family}: the class of config.json in transformers has no limits of SwiGLU ({key})."
            )
        return {}

    return Derived(read, write)


def _fixed(value: Any, why: str, *names: str) -> dict[str, Fixed]:
    return dict.fromkeys(names, Fixed((value,), why))


_OTHER = "the class of this family has no such setting"
_LIGHTNING = "this is a model with lightning attention (Ling 2.5), which is not supported"

FAMILY = Family(
    name="bailing_hybrid",
    hf_architecture="BailingHybridForCausalLM",
    keys=without(mla.KEYS, "tie_embeddings")
    | {
        "mla.q_lora_rank": Key("q_lora_rank", default=None, optional=True),
        "max_position_embeddings": Key("max_position_embeddings", default=262144, aliases=("model_max_length",)),
        "delta_net.norm_epsilon": number("rms_norm_eps", 1e-6),
        "delta_net.num_key_heads": Key("linear_num_heads", default=None, null=lambda hf: hf["num_attention_heads"]),
        "delta_net.num_value_heads": Key("linear_num_heads", default=None, null=lambda hf: hf["num_attention_heads"]),
        "moe.num_experts": Key("num_experts", default=512, aliases=("num_local_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=8, aliases=("num_experts_per_token",)),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=768),
        "moe.scaling_factor": number("routed_scaling_factor", 2.5),
        "moe.normalize": replace(flag("norm_topk_prob", default=True), aliases=("moe_renormalize",)),
        "moe.num_groups": Key("n_group", default=8, aliases=("num_expert_group",)),
        "moe.group_top_k": Key("topk_group", default=4),
        "mtp_layers": mtp.KEY,
    },
    fixed=mla.FIXED
    | _fixed("sigmoid", "the only score function of this family", "score_function", "scoring_func")
    | _fixed("noaux_tc", "the only expert selection of this family", "topk_method")
    | _fixed("head_wise", "the only gate of this family", "gated_attention_proj_granularity_type")
    | _fixed(True, _OTHER, "no_kda_lora", "rope_interleave", "linear_silu", "moe_router_enable_expert_bias")
    | _fixed(False, _OTHER, "use_mla_nope", "use_nGPT", "up_proj_norm", "value_norm", "scale_router_input")
    | _fixed(False, _OTHER, "use_bias", "use_qkv_bias", "use_kda_lora", "mtp_use_kda", "tie_word_embeddings")
    | _fixed(1, _LIGHTNING, "group_norm_size"),
    traits={
        "rotary_interleaved": True,
        "head_gate": True,
        "moe.score": "sigmoid",
        "moe.expert_bias": True,
        "delta_net.low_rank_gates": False,
    },
    derived=mla.DERIVED
    | {
        "mixers": delta_net.mixers(_KIND, _layer_types),
        "moe.shared_ffn_hidden_size": expert_tensors.shared_experts(
            "num_shared_experts", "moe_shared_expert_intermediate_size", default=1, aliases=("n_shared_experts",)
        ),
        "moe.dense_layers": expert_tensors.mlp_layer_types(2, "first_k_dense_replace"),
        "moe.swiglu_limits": _without_limits("expert_swiglu_limit_list"),
        "swiglu_limits": _without_limits("share_expert_swiglu_limit_list"),
        "delta_net.key_head_dim": _size(128, "linear_head_dim", "head_dim"),
        "delta_net.value_head_dim": _size(128, "linear_head_dim", "head_dim"),
        "delta_net.conv_kernel": _size(4, "linear_conv_kernel_dim", "short_conv_kernel_size"),
        "delta_net.least_log_decay": Derived(_bound, _write_bound),
    },
    rope_defaults={"rope_theta": 6000000.0, "partial_rotary_factor": None},
    other_names={".attention.dense.": ".attention.o_proj."},
    module_names={
        "word_embeddings": "embed_tokens",
        ".attention.f_": ".self_attn.forget_gate.f_",
        ".attention.dense": ".self_attn.o_proj",
        ".attention.": ".self_attn.",
    },
    rules=(
        *renamed(decoder.EMBEDDING, {"embed_tokens": "word_embeddings"}),
        *_LAYER,
        *renamed(mtp.mtp_rules(_LAYER, copies=False), {"shared_head.norm": "final_layernorm"}),
        *renamed(decoder.HEAD, {"embed_tokens": "word_embeddings"}),
    ),
)
