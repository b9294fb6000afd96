"""Qwen1.5-MoE and Qwen2-57B-A14B: shared experts with a sigmoid gate."""

from isthmus.families.family import Family, Fixed, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="qwen2_moe",
    hf_architecture="Qwen2MoeForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=16, max_position_embeddings=32768)
    | {
        "qkv_bias": flag("qkv_bias", default=True),
        "moe.num_experts": Key("num_experts", default=60),
        "moe.top_k": Key("num_experts_per_tok", default=4),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=1408),
        "moe.shared_ffn_hidden_size": Key("shared_expert_intermediate_size", default=5632),
        "moe.normalize": flag("norm_topk_prob"),
    },
    fixed=decoder.FIXED | {"use_sliding_window": Fixed((False,), "sliding windows are not supported for this family")},
    traits={"moe.shared_gate": True},
    derived={"moe.dense_layers": expert_tensors.sparse_step()},
    rules=decoder.pre_norm_rules(mlp=expert_tensors.GATED_SHARED_MLP),
)
