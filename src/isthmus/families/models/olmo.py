"""OLMo 1: LayerNorms without weights, optionally clipped queries, keys and values."""

from isthmus.families.family import Family, with_defaults, without
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import number

FAMILY = Family(
    name="olmo",
    hf_architecture="OlmoForCausalLM",
    keys=with_defaults(without(decoder.KEYS, "norm_epsilon"), max_position_embeddings=2048)
    | decoder.ATTENTION_BIAS
    | {"clip_qkv": number("clip_qkv", None)},
    fixed=decoder.FIXED,
    traits={"normalization": "LayerNorm", "norm_weight": False, "norm_epsilon": 1e-5},
    rules=decoder.without_norms(decoder.RULES),
)
