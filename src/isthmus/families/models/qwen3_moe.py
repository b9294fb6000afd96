"""Qwen3 with experts (30B-A3B, 235B-A22B): QK norms, experts in all layers except those listed."""

from isthmus.families.family import Family, Fixed, with_defaults
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="qwen3_moe",
    hf_architecture="Qwen3MoeForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=4, max_position_embeddings=32768)
    | decoder.ATTENTION_BIAS
    | with_defaults(expert_tensors.KEYS, num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768)
    | {"moe.normalize": flag("norm_topk_prob")},
    fixed=decoder.FIXED | {"use_sliding_window": Fixed((False,), "sliding windows are not supported for this family")},
    traits={"qk_norm": True},
    derived={"moe.dense_layers": expert_tensors.sparse_step()},
    rules=expert_tensors.RULES,
)
