"""Qwen3 with experts (30B-A3B, 235B-A22B): norms on queries and keys, experts in all layers but those named."""

from isthmus.families import decoder, experts
from isthmus.families.family import Family, Fixed, Key

FAMILY = Family(
    name="qwen3_moe",
    hf_architecture="Qwen3MoeForCausalLM",
    keys=decoder.KEYS
    | {
        "num_query_groups": decoder.kv_heads(default=4),
        "max_position_embeddings": Key("max_position_embeddings", default=32768),
        "moe.num_experts": Key("num_experts", default=128, aliases=("num_local_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=8),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=768),
        "moe.normalize": Key("norm_topk_prob", kind=bool, default=False),
    },
    fixed=decoder.FIXED
    | {
        "attention_bias": Fixed((False,), "it would put a bias on the output projection too"),
        "use_sliding_window": Fixed((False,), "windows are not built for this family"),
    },
    traits={"qk_norm": True},
    derived={"moe.dense_layers": experts.SPARSE_STEP},
    rules=(
        *decoder.EMBEDDING,
        *decoder.INPUT_NORM,
        *decoder.ATTENTION,
        *decoder.QK_NORM,
        *experts.NORM,
        *experts.DENSE,
        *experts.ROUTER,
        *experts.EXPERTS,
        *decoder.HEAD,
    ),
    ignorable=decoder.IGNORABLE,
)
