"""K-EXAONE: QK norms, layers without a window or rotary embedding, sigmoid routing with an expert bias."""

from isthmus.families.family import Family, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag, number
from isthmus.families.rules.rule import renamed
from isthmus.families.rules.unrotated import unrotated_full_layers

FAMILY = Family(
    name="exaone_moe",
    hf_architecture="ExaoneMoeForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=2048, rms_norm_eps=1e-5)
    | {
        "num_query_groups": Key("num_key_value_heads", default=32),
        "moe.num_experts": Key("num_experts", default=64),
        "moe.top_k": Key("num_experts_per_tok", default=8),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=1024),
        "moe.shared_ffn_hidden_size": expert_tensors.shared_width("num_shared_experts", default=1),
        "moe.scaling_factor": number("routed_scaling_factor", 2.5),
        "moe.normalize": flag("norm_topk_prob", default=True),
        "moe.num_groups": Key("n_group", default=1),
        "moe.group_top_k": Key("topk_group", default=1),
    },
    fixed=decoder.FIXED,
    traits={"qk_norm": True, "moe.score": "sigmoid", "moe.expert_bias": True},
    derived={
        "moe.dense_layers": expert_tensors.mlp_layer_types(dense=1, key="first_k_dense_replace"),
        "unrotated_layers": unrotated_full_layers(window=4096, pattern=4, null_rotates=True),
    },
    sliding_window="pattern",
    sliding_window_default=4096,
    sliding_window_pattern=4,
    passed_through=("mtp.*",),
    rules=renamed(expert_tensors.RULES, {"mlp.gate.e_score": "mlp.e_score"}),
)
