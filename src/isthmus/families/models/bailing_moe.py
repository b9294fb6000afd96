"""Ling 1 and 2: fused projections; version 2 has QK norms, partial rotation and sigmoid routing in groups.

The ``model_type`` is the same, and the class in ``architectures`` decides. transformers has neither class.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Derived, Family, Fixed, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors, mtp
from isthmus.families.rules.decoder import HF_LAYER, LAYER, flag, number
from isthmus.families.rules.rule import qkv, renamed, where

_FIRST, _SECOND = "BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"
_UNLIKE_SECOND = ("rms_norm_eps", "rope_theta", "num_experts_per_tok")
"""Settings with other defaults in version 1, which no tensor shows."""
_QKV = f"{HF_LAYER}attention.query_key_value."
_NAMES = {
    "embed_tokens": "word_embeddings",
    "self_attn.o_proj": "attention.dense",
    "self_attn.q_norm": "attention.query_layernorm",
    "self_attn.k_norm": "attention.key_layernorm",
    "e_score_correction_bias": "expert_bias",
    "shared_head.norm": "final_layernorm",
}
_ATTENTION = (
    qkv(f"{LAYER}self_attention.linear_qkv.weight", *(f"{_QKV}weight",) * 3, "H"),
    *where("qkv_bias", qkv(f"{LAYER}self_attention.linear_qkv.bias", *(f"{_QKV}bias",) * 3, init="zeros")),
    decoder.PROJECTION,
    decoder.PROJECTION_BIAS,
    *decoder.QK_NORMS,
)
_LAYER = (*decoder.INPUT_NORM, *_ATTENTION, *expert_tensors.MLP)


def _is_first(hf: Mapping[str, Any]) -> bool:
    names = hf.get("architectures")
    if not isinstance(names, list) or _FIRST not in names:
        return False
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    rope = rope if isinstance(rope, Mapping) else {}  # refused where it is read
    share = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1))
    if rope.get("rope_type", rope.get("type", "default")) != "default" or share != 1:
        raise UsageError(f"config.json: {_FIRST} is supported without rope_scaling and partial_rotary_factor.")
    if lacking := [name for name in _UNLIKE_SECOND if name not in hf and name not in rope]:
        raise UsageError(
            f"config.json lacks {', '.join(lacking)}, whose default in {_FIRST} is not that of {_SECOND}. Add it."
        )
    return True


def _of_second(key: Key, first: Any) -> Derived:
    """A setting of version 2; version 1 has the value ``first``."""

    def write(value: Any, arch: Architecture) -> dict[str, Any]:
        is_first = arch.moe is not None and arch.moe.score == "softmax"
        if is_first and value != first:
            raise UsageError(f"{arch.family}: config.json of {_FIRST} cannot express {key.hf}={value}.")
        return {} if is_first else {key.hf: value}

    return Derived(lambda hf: first if _is_first(hf) else key.read(hf), write)


def _normalizes(hf: Mapping[str, Any]) -> bool:
    wanted = flag("norm_topk_prob", default=True).read(hf) or not _is_first(hf)
    return wanted and Key("num_experts_per_tok", default=8).read(hf) > 1


def _write_normalizes(value: bool, arch: Architecture) -> dict[str, Any]:
    if arch.moe is not None and arch.moe.score == "sigmoid" and value != (arch.moe.top_k > 1):
        raise UsageError(f"{arch.family}: {_SECOND} normalizes the weights of several experts and only those.")
    return {"norm_topk_prob": value}


def _by_version(first: Any, second: Any, write: Callable[[Any, Architecture], dict[str, Any]]) -> Derived:
    return Derived(lambda hf: first if _is_first(hf) else second, write)


FAMILY = Family(
    name="bailing_moe",
    hf_architecture=_SECOND,
    own_code=True,
    keys=with_defaults(decoder.KEYS, head_dim=None, max_position_embeddings=32768, num_key_value_heads=4)
    | {
        "qkv_bias": flag("use_qkv_bias"),
        "proj_bias": flag("use_bias"),
        "moe.num_experts": Key("num_experts", default=256),
        "moe.top_k": Key("num_experts_per_tok", default=8),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=512),
        "moe.dense_layers": expert_tensors.first_dense(default=1),
        "mtp_layers": replace(mtp.KEY, default=0),
    },
    fixed=decoder.FIXED
    | {
        "norm_head": Fixed((False,), "normalized output layers are not supported"),
        "use_rmsnorm": Fixed((True,), "the only norm of this family"),
        "use_sliding_window": Fixed((False,), "not all attention functions of its class have windows"),
        "score_function": Fixed(("sigmoid",), "the only score function of version 2"),
        "moe_router_enable_expert_bias": Fixed((True,), "routers of version 2 have a bias"),
        "router_dtype": Fixed(("fp32",), "routers compute in float32"),
        **dict.fromkeys(("embedding_dropout", "output_dropout"), Fixed((0.0,), "unused by its class", training=True)),
    },
    derived={
        "moe.shared_ffn_hidden_size": expert_tensors.shared_experts(
            "num_shared_experts", "moe_shared_expert_intermediate_size", default=1
        ),
        "qk_norm": _of_second(flag("use_qk_norm", default=True), False),
        "moe.num_groups": _of_second(Key("n_group", default=8), 1),
        "moe.group_top_k": _of_second(Key("topk_group", default=4), 1),
        "moe.scaling_factor": _of_second(number("routed_scaling_factor", 1.0), 1.0),
        "moe.score": _by_version(
            "softmax", "sigmoid", lambda score, _arch: {"architectures": [_FIRST if score == "softmax" else _SECOND]}
        ),
        "moe.expert_bias": _by_version(False, True, lambda _bias, _arch: {}),
        "moe.normalize": Derived(_normalizes, _write_normalizes),
    },
    rope_defaults={"rope_theta": 600000.0, "partial_rotary_factor": 1.0},
    rules=renamed((*decoder.EMBEDDING, *_LAYER, *mtp.mtp_rules(_LAYER, copies=False), *decoder.HEAD), _NAMES),
)
