"""Cohere Command R: parallel attention and MLP after one LayerNorm without bias, scaled logits."""

from isthmus.families.family import Family, Fixed, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number

FAMILY = Family(
    name="cohere",
    hf_architecture="CohereForCausalLM",
    keys=decoder.KEYS
    | decoder.ATTENTION_BIAS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=8192),
        "norm_epsilon": number("layer_norm_eps", 1e-5),
        "logits_multiplier": number("logit_scale", 0.0625),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
    },
    fixed=decoder.FIXED | {"use_qk_norm": Fixed((False,), "QK norms with one weight per head are not supported")},
    traits={"form": "parallel", "normalization": "LayerNorm", "norm_bias": False, "rotary_interleaved": True},
    rope_defaults={"rope_theta": 500000.0},
    rules=(*decoder.EMBEDDING, *decoder.INPUT_NORM, *decoder.ATTENTION, *decoder.MLP, *decoder.HEAD),
)
