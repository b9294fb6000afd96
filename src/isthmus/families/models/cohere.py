"""Cohere Command R: parallel attention and MLP after one LayerNorm without bias, scaled logits."""

from isthmus.families.family import Family, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number

_QK_NORMS = decoder.each_head_norms("q_norm.weight", "k_norm.weight", stacked=True)

FAMILY = Family(
    name="cohere",
    hf_architecture="CohereForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=8192, tie_word_embeddings=True)
    | decoder.ATTENTION_BIAS
    | {
        "norm_epsilon": number("layer_norm_eps", 1e-5),
        "qk_norm": flag("use_qk_norm"),
        "logits_multiplier": number("logit_scale", 0.0625),
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
