"""Llama 2, 3, 3.1, 3.2 and the many models published under the same architecture."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="llama",
    hf_architecture="LlamaForCausalLM",
    keys=decoder.KEYS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=2048),
        "qkv_bias": flag("attention_bias"),
        "proj_bias": flag("attention_bias"),
        "mlp_bias": flag("mlp_bias"),
    },
    fixed=decoder.FIXED,
    rules=(
        *decoder.EMBEDDING,
        *decoder.INPUT_NORM,
        *decoder.ATTENTION,
        *decoder.QKV_BIAS,
        *decoder.PROJ_BIAS,
        *decoder.GATED_MLP,
        *decoder.MLP_BIAS,
        *decoder.HEAD,
    ),
    ignorable=decoder.IGNORABLE,
)
