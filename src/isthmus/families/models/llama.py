"""Llama 2, 3, 3.1, 3.2 and the many models published under the same architecture."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="llama",
    hf_architecture="LlamaForCausalLM",
    keys=decoder.KEYS
    | decoder.ATTENTION_BIAS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=2048),
        "mlp_bias": flag("mlp_bias"),
    },
    fixed=decoder.FIXED,
    rules=decoder.RULES,
)
