"""Qwen3, dense: QK norms, an independent head dim."""

from isthmus.families.family import Family, Key, with_defaults
from isthmus.families.rules import decoder

FAMILY = Family(
    name="qwen3",
    hf_architecture="Qwen3ForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=32, max_position_embeddings=32768)
    | decoder.ATTENTION_BIAS
    | {"kv_channels": Key("head_dim", default=128)},
    fixed=decoder.FIXED,
    traits={"qk_norm": True},
    sliding_window="by_layer",
    sliding_window_default=4096,
    rules=decoder.RULES,
)
