"""Cohere Command R: attention and MLP side by side behind one LayerNorm without bias, logits scaled down."""

from isthmus.families.family import Family, Fixed, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="cohere",
    hf_architecture="CohereForCausalLM",
    keys=decoder.KEYS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=8192),
        "norm_epsilon": Key("layer_norm_eps", kind=float, default=1e-5),
        "qkv_bias": flag("attention_bias"),
        "proj_bias": flag("attention_bias"),
        "logits_multiplier": Key("logit_scale", kind=float, default=0.0625),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
    },
    fixed=decoder.FIXED | {"use_qk_norm": Fixed((False,), "norms with weights of each head's own are not built")},
    traits={"form": "parallel", "normalization": "LayerNorm", "norm_bias": False, "rotary_interleaved": True},
    rope_defaults={"rope_theta": 500000.0},
    rules=(
        *decoder.EMBEDDING,
        *decoder.INPUT_NORM,
        *decoder.ATTENTION,
        *decoder.QKV_BIAS,
        *decoder.PROJ_BIAS,
        *decoder.GATED_MLP[1:],
        *decoder.HEAD,
    ),
    ignorable=decoder.IGNORABLE,
)
