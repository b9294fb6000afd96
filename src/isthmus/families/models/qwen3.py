"""Qwen3, dense: QK norms, an independent head dim."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder

FAMILY = Family(
    name="qwen3",
    hf_architecture="Qwen3ForCausalLM",
    keys=decoder.KEYS
    | decoder.ATTENTION_BIAS
    | {
        "num_query_groups": decoder.kv_heads(default=32),
        "kv_channels": Key("head_dim", default=128),
        "max_position_embeddings": Key("max_position_embeddings", default=32768),
    },
    fixed=decoder.FIXED,
    traits={"qk_norm": True},
    sliding_window="by_layer",
    sliding_window_default=4096,
    rules=decoder.RULES,
)
