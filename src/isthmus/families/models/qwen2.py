"""Qwen2 and Qwen2.5: biases on query, key and value."""

from isthmus.families.family import Family, with_defaults
from isthmus.families.rules import decoder

FAMILY = Family(
    name="qwen2",
    hf_architecture="Qwen2ForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=32, max_position_embeddings=32768),
    fixed=decoder.FIXED,
    traits={"qkv_bias": True},
    sliding_window="by_layer",
    sliding_window_default=4096,
    rules=decoder.RULES,
)
