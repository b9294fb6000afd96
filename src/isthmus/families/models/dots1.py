"""dots.llm1: QK norms, experts of DeepSeek-V3, sliding windows in the layers from ``max_window_layers`` on."""

from isthmus.families.family import Family, with_defaults
from isthmus.families.rules import decoder, expert_tensors

FAMILY = Family(
    name="dots1",
    hf_architecture="Dots1ForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=32, max_position_embeddings=2048)
    | decoder.ATTENTION_BIAS
    | with_defaults(expert_tensors.DEEPSEEK_KEYS, moe_intermediate_size=1408, n_shared_experts=0, norm_topk_prob=False)
    | {"moe.dense_layers": expert_tensors.first_dense(default=0)},
    fixed=decoder.FIXED,
    traits={"qk_norm": True, "moe.score": "sigmoid", "moe.expert_bias": True},
    sliding_window="by_depth",
    sliding_window_default=4096,
    sliding_window_pattern=62,
    rules=expert_tensors.RULES,
)
