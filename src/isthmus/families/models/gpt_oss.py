"""gpt-oss: attention sinks, alternating sliding window, experts stacked in one tensor, transposed, with biases."""

from typing import Any

from isthmus.families.family import Family, Fixed, Key, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import in_layer
from isthmus.families.rules.rule import copy, gate_up

_FC1, _FC2 = (f"{decoder.LAYER}mlp.experts.local_experts.{{expert}}.linear_{name}." for name in ("fc1", "fc2"))
_GATE_UP, _DOWN = (f"{decoder.HF_LAYER}mlp.experts.{name}_proj" for name in ("gate_up", "down"))
# The rows of gate and up projection alternate.
_ROWS: dict[str, Any] = {"width": "X", "interleaved": True, "stacked": True}
EXPERTS = (
    gate_up(_FC1 + "weight", _GATE_UP, _GATE_UP, "H", transposed=True, **_ROWS),
    gate_up(_FC1 + "bias", _GATE_UP + "_bias", _GATE_UP + "_bias", init="zeros", **_ROWS),
    copy(_FC2 + "weight", _DOWN, "H", "X", shard="cols", transposed=True, stacked=True),
    copy(_FC2 + "bias", _DOWN + "_bias", "H", stacked=True, init="zeros"),
)

FAMILY = Family(
    name="gpt_oss",
    hf_architecture="GptOssForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5)
    | with_defaults(decoder.ATTENTION_BIAS, attention_bias=True)
    | {
        "kv_channels": Key("head_dim", default=64),
        "moe.ffn_hidden_size": Key("intermediate_size"),
        "moe.num_experts": Key("num_local_experts", default=128, aliases=("num_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=4, aliases=("experts_per_token",)),
    },
    fixed=decoder.FIXED
    | {
        "swiglu_alpha": Fixed((1.702,), "the slope of the sigmoid is part of the activation"),
        "swiglu_limit": Fixed((7.0,), "the input bounds are part of the activation"),
    },
    traits={
        "activation": "clamped_swiglu",
        "attention_sinks": True,
        "moe.score": "softmax_of_chosen",
        "moe.router_bias": True,
        "moe.expert_mlp_bias": True,
    },
    sliding_window="pattern",
    sliding_window_default=128,
    sliding_window_pattern=2,
    rope_defaults={
        "rope_theta": 150000.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    rules=decoder.pre_norm_rules(
        attention=(
            *decoder.ATTENTION,
            in_layer("self_attention.core_attention.softmax_offset", "self_attn.sinks", "N", shard="rows"),
        ),
        mlp=(
            in_layer("mlp.router.weight", "mlp.router.weight", "E", "H"),
            in_layer("mlp.router.bias", "mlp.router.bias", "E", init="zeros"),
            *EXPERTS,
        ),
    ),
)
