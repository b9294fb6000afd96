"""Llama 2, 3, 3.1, 3.2 and the many models published under the same architecture."""

from isthmus.families import decoder
from isthmus.families.family import Family, Fixed, Key

FAMILY = Family(
    name="llama",
    hf_architecture="LlamaForCausalLM",
    keys=decoder.KEYS | {"max_position_embeddings": Key("max_position_embeddings", default=2048)},
    fixed=decoder.FIXED
    | {
        "attention_bias": Fixed((False,), "it would put a bias on the output projection too"),
        "mlp_bias": Fixed((False,), "MLPs are built without biases"),
    },
    rules=(
        *decoder.EMBEDDING,
        *decoder.INPUT_NORM,
        *decoder.ATTENTION,
        *decoder.GATED_MLP,
        *decoder.HEAD,
    ),
    ignorable=decoder.IGNORABLE,
)
