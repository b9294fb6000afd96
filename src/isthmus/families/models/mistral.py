"""Mistral 7B and its dense successors: Llama's tensors, sliding-window attention."""

from isthmus.families.family import Family, Fixed, with_defaults
from isthmus.families.rules import decoder

FAMILY = Family(
    name="mistral",
    hf_architecture="MistralForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=8, max_position_embeddings=131072),
    fixed=decoder.FIXED | {"layer_types": Fixed((None,), "all layers of Mistral have the same kind of attention")},
    sliding_window="always",
    sliding_window_default=4096,
    rules=decoder.RULES,
)
