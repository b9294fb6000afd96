"""Cohere Command R: parallel attention and MLP after one LayerNorm without bias, scaled logits."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number

_QK_NORMS = decoder.each_head_norms("q_norm.weight", "k_norm.weight", stacked=True)

FAMILY = Family(
    name="cohere",
    hf_architecture="CohereForCausalLM",
    keys=decoder.KEYS
    | decoder.ATTENTION_BIAS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=8192),
        "norm_epsilon": number("layer_norm_eps", 1e-5),
        "qk_norm": flag("use_qk_norm"),
        "logits_multiplier": number("logit_scale", 0.0625),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
    },
    fixed=decoder.FIXED,
    traits={
        "form": "parallel",
        "normalization": "LayerNorm",
        "norm_bias": False,
        "rotary_interleaved": True,
        "qk_norm_over": "each_head",
    },
    rope_defaults={"rope_theta": 500000.0},
    rules=(*decoder.EMBEDDING, *decoder.INPUT_NORM, *decoder.ATTENTION, *_QK_NORMS, *decoder.MLP, *decoder.HEAD),
)
