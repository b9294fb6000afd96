"""dots.llm1: QK norms, experts of DeepSeek-V3, sliding windows in the layers from ``max_window_layers`` on."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag, number

FAMILY = Family(
    name="dots1",
    hf_architecture="Dots1ForCausalLM",
    keys=decoder.KEYS
    | decoder.ATTENTION_BIAS
    | {
        "num_query_groups": decoder.kv_heads(default=32),
        "max_position_embeddings": Key("max_position_embeddings", default=2048),
        "moe.num_experts": Key("n_routed_experts", aliases=("num_local_experts",)),
        "moe.top_k": Key("num_experts_per_tok"),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=1408),
        "moe.shared_ffn_hidden_size": expert_tensors.shared_width("n_shared_experts", default=0),
        "moe.scaling_factor": number("routed_scaling_factor", 1.0),
        "moe.normalize": flag("norm_topk_prob"),
        "moe.num_groups": Key("n_group", default=1),
        "moe.group_top_k": Key("topk_group", default=1),
        "moe.dense_layers": expert_tensors.first_dense(default=0),
    },
    fixed=decoder.FIXED,
    traits={"qk_norm": True, "moe.score": "sigmoid", "moe.expert_bias": True},
    sliding_window="by_depth",
    sliding_window_default=4096,
    sliding_window_pattern=62,
    rules=expert_tensors.RULES,
)
