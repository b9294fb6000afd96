"""Llama 2, 3, 3.1, 3.2 and the many models published under the same architecture."""

from isthmus.families.family import Family, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="llama",
    hf_architecture="LlamaForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=2048)
    | decoder.ATTENTION_BIAS
    | {"mlp_bias": flag("mlp_bias")},
    fixed=decoder.FIXED,
    rules=decoder.RULES,
)
