"""Mistral 7B and its dense successors: Llama's tensors, sliding-window attention."""

from isthmus.families.family import Family, Fixed, Key
from isthmus.families.rules import decoder

FAMILY = Family(
    name="mistral",
    hf_architecture="MistralForCausalLM",
    keys=decoder.KEYS
    | {
        "num_query_groups": decoder.kv_heads(default=8),
        "max_position_embeddings": Key("max_position_embeddings", default=131072),
    },
    fixed=decoder.FIXED | {"layer_types": Fixed((None,), "all layers of Mistral have the same kind of attention")},
    sliding_window="always",
    sliding_window_default=4096,
    rules=decoder.RULES,
)
