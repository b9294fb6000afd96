"""MiMo-V2-Flash: sliding-window layers with twice the key heads and attention sinks, values narrower than keys."""

from isthmus.families.family import Family, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag, in_layer, number
from isthmus.families.rules.rule import by_window

FAMILY = Family(
    name="mimo_v2_flash",
    hf_architecture="MiMoV2FlashForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=131072, rms_norm_eps=1e-5)
    | {
        "num_query_groups": Key("num_key_value_heads", default=4),
        "window_attention.num_query_groups": Key(
            "num_key_value_heads", default=4, decode=lambda heads, hf: 2 * heads, encode=lambda heads, arch: heads // 2
        ),
        "kv_channels": Key("head_dim", default=192),
        "value_channels": Key("v_head_dim", default=128),
        "value_multiplier": number("attention_value_scale", 0.707),
        "qkv_bias": flag("attention_bias"),
        "moe.num_experts": Key("n_routed_experts", default=256, aliases=("num_local_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=8),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=2048),
        "moe.scaling_factor": Key("routed_scaling_factor", kind=float, default=1.0, null=lambda hf: 1.0),
        "moe.normalize": flag("norm_topk_prob", default=True),
        "moe.num_groups": Key("n_group", default=1),
        "moe.group_top_k": Key("topk_group", default=1),
    },
    fixed=decoder.FIXED,
    traits={"window_attention.attention_sinks": True, "moe.score": "sigmoid", "moe.expert_bias": True},
    derived={"moe.dense_layers": expert_tensors.mlp_layer_types(dense=1)},
    sliding_window="first_and_pattern",
    sliding_window_default=129,
    sliding_window_pattern=6,
    rope_defaults={"rope_theta": 5000000.0, "rope_local_base_freq": 10000.0, "partial_rotary_factor": 0.334},
    flat_rope=False,
    passed_through=("model.mtp.*",),
    rules=decoder.pre_norm_rules(
        attention=(
            *by_window(*decoder.ATTENTION),
            in_layer(
                "self_attention.core_attention.softmax_offset",
                "self_attn.attention_sink_bias",
                "Nw",
                shard="rows",
                layers="windowed",
            ),
        ),
        mlp=expert_tensors.DENSE_AND_MOE,
    ),
)
