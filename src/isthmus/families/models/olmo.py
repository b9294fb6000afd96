"""OLMo 1: LayerNorms without weights, optionally clipped queries, keys and values."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import number

FAMILY = Family(
    name="olmo",
    hf_architecture="OlmoForCausalLM",
    keys={name: key for name, key in decoder.KEYS.items() if name != "norm_epsilon"}
    | decoder.ATTENTION_BIAS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=2048),
        "clip_qkv": number("clip_qkv", None),
    },
    fixed=decoder.FIXED,
    traits={"normalization": "LayerNorm", "norm_weight": False, "norm_epsilon": 1e-5},
    rules=decoder.without_norms(decoder.RULES),
)
