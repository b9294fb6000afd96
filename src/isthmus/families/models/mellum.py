"""Mellum 2: Qwen3's experts, with sliding-window layers whose rotary base may differ."""

from isthmus.families.family import Family, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="mellum",
    hf_architecture="MellumForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=131072)
    | decoder.ATTENTION_BIAS
    | {
        "num_query_groups": Key("num_key_value_heads", default=4),
        "kv_channels": Key("head_dim", default=128),
        "moe.num_experts": Key("num_local_experts", default=64, aliases=("num_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=8),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=896),
        "moe.normalize": flag("norm_topk_prob", default=True),
    },
    fixed=decoder.FIXED,
    traits={"qk_norm": True},
    derived={"moe.dense_layers": expert_tensors.mlp_layer_types(dense=0)},
    sliding_window="pattern",
    sliding_window_default=1024,
    sliding_window_pattern=lambda _hf, layers: range(layers),
    rope_defaults={"rope_theta": 500000.0, "rope_local_base_freq": 10000.0},
    flat_rope=False,
    passed_through=("mtp.*",),
    rules=expert_tensors.RULES,
)
