"""Qwen3 with experts (30B-A3B, 235B-A22B): QK norms, experts in all layers except those listed."""

from isthmus.families.family import Family, Fixed, Key
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="qwen3_moe",
    hf_architecture="Qwen3MoeForCausalLM",
    keys=decoder.KEYS
    | decoder.ATTENTION_BIAS
    | {
        "num_query_groups": decoder.kv_heads(default=4),
        "max_position_embeddings": Key("max_position_embeddings", default=32768),
        "moe.num_experts": Key("num_experts", default=128, aliases=("num_local_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=8),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=768),
        "moe.normalize": flag("norm_topk_prob"),
    },
    fixed=decoder.FIXED | {"use_sliding_window": Fixed((False,), "sliding windows are not supported for this family")},
    traits={"qk_norm": True},
    derived={"moe.dense_layers": expert_tensors.sparse_step()},
    rules=expert_tensors.RULES,
)
