"""Granite 3, dense: Llama with multipliers on embeddings, residuals, scores and logits."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="granite",
    hf_architecture="GraniteForCausalLM",
    keys=decoder.KEYS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=2048),
        "qkv_bias": flag("attention_bias"),
        "proj_bias": flag("attention_bias"),
        "mlp_bias": flag("mlp_bias"),
        "embedding_multiplier": Key("embedding_multiplier", kind=float, default=1.0),
        "residual_multiplier": Key("residual_multiplier", kind=float, default=1.0),
        "attention_scale": Key("attention_multiplier", kind=float, default=1.0),
        "logits_multiplier": Key(
            "logits_scaling",
            kind=float,
            default=1.0,
            decode=lambda divisor, _: 1 / divisor,
            encode=lambda multiplier, _: 1 / multiplier,
        ),
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
