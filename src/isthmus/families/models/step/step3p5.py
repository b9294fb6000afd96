"""Step 3.5: more heads and other rotations in sliding-window layers, gates of heads, limits of SwiGLU."""

from typing import Any

from isthmus.families.family import Family, Fixed, Key, with_defaults
from isthmus.families.models.step import padded_lists
from isthmus.families.rules import decoder, expert_tensors, mla
from isthmus.families.rules.decoder import HF_LAYER, LAYER, number
from isthmus.families.rules.rule import by_window, renamed

_NAMES = {".mlp.gate.e_score_correction_bias": ".moe.router_bias", ".mlp.gate.": ".moe.gate."}
_EXPERTS = decoder.mlp(
    LAYER + "mlp.experts.local_experts.{expert}.", HF_LAYER + "moe.", "X", layers="moe", stacked=True
)
_MLP = (
    *expert_tensors.DENSE,
    *renamed((*expert_tensors.ROUTER, *expert_tensors.EXPERT_BIAS), _NAMES),
    *_EXPERTS,
    *renamed(expert_tensors.SHARED_EXPERTS, {".mlp.shared_experts.": ".share_expert."}),
)


def _fixed(value: Any, *names: str) -> dict[str, Fixed]:
    return dict.fromkeys(names, Fixed((value,), "transformers has no such setting for this class"))


FAMILY = Family(
    name="step3p5",
    hf_architecture="Step3p5ForCausalLM",
    own_code=True,
    spelling=padded_lists.newer_spelling,
    keys=with_defaults(decoder.KEYS, intermediate_size=11264, max_position_embeddings=128000, rms_norm_eps=1e-5)
    | decoder.ATTENTION_BIAS
    | {
        "hidden_size": Key("hidden_size", default=4096),
        "num_layers": Key("num_hidden_layers", default=45),
        "num_attention_heads": Key("num_attention_heads", default=64),
        "num_query_groups": Key("num_key_value_heads", default=8, aliases=("num_attention_groups",)),
        "kv_channels": Key("head_dim", default=128),
        "vocab_size": Key("vocab_size", default=128815),
        "attention_scale": Key(
            "query_pre_attn_scalar",
            kind=float,
            default=None,
            null=lambda hf: hf.get("head_dim", 128),
            decode=lambda width, _: width**-0.5,
            encode=lambda scale, _: round(scale**-2),
        ),
        "moe.num_experts": Key("n_routed_experts", default=288, aliases=("moe_num_experts", "num_local_experts")),
        "moe.top_k": Key("num_experts_per_tok", default=8, aliases=("moe_top_k",)),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=1280),
        "moe.shared_ffn_hidden_size": Key("share_expert_dim", default=1280, aliases=("share_expert_dims",)),
        "moe.scaling_factor": number("moe_router_scaling_factor", 1.0),
    },
    derived={
        "window_attention.num_attention_heads": padded_lists.WINDOW_HEADS,
        "moe.dense_layers": expert_tensors.mlp_layer_types(dense=3),
        "moe.swiglu_limits": padded_lists.swiglu_limits("swiglu_limits"),
        "swiglu_limits": padded_lists.swiglu_limits("swiglu_limits_shared"),
    },
    fixed=decoder.FIXED
    | _fixed(True, "zero_centered", "use_qk_norm", "use_head_wise_attn_gate", "use_moe", "use_moe_router_bias")
    | _fixed(True, "norm_expert_weight")
    | _fixed(False, "mlp_bias", "use_mfa", "use_bidirectional_attention", "sink")
    | _fixed("sigmoid", "moe_router_activation")
    | _fixed("GQA", "att_impl_type")
    | {
        "gating": Fixed((True, "per-head"), "only gates of whole heads are supported"),
        "use_rope_layers": Fixed(([], None), "layers without rotary embedding are not supported for this family"),
        "yarn_only_types": Fixed((["full_attention"],), "rope scaling is supported in full_attention layers only"),
        "sparse_attention_config": Fixed((None, {}), "sparse attention is not supported for this family"),
    },
    traits={
        "norm_zero_centered": True,
        "qk_norm": True,
        "head_gate": True,
        "moe.score": "sigmoid",
        "moe.expert_bias": True,
        "moe.normalize": True,
    },
    sliding_window="listed",
    rope_defaults={"rope_theta": 10000.0, "rope_local_base_freq": None, "partial_rotary_factor": 1.0},
    flat_rope=False,
    passed_layers="eh_proj.weight",
    unadapted=(".moe.gate_proj", ".moe.up_proj", ".moe.down_proj"),
    rules=decoder.pre_norm_rules(attention=by_window(*decoder.ATTENTION, mla.HEAD_GATE), mlp=_MLP),
)
