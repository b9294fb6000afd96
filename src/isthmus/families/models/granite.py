"""Granite 3, dense: Llama with multipliers on embeddings, residuals, scores and logits."""

from isthmus.families.family import Family, Key, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number

FAMILY = Family(
    name="granite",
    hf_architecture="GraniteForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=2048)
    | decoder.ATTENTION_BIAS
    | {
        "mlp_bias": flag("mlp_bias"),
        "embedding_multiplier": number("embedding_multiplier", 1.0),
        "residual_multiplier": number("residual_multiplier", 1.0),
        "attention_scale": number("attention_multiplier", 1.0),
        "logits_multiplier": Key(
            "logits_scaling",
            kind=float,
            default=1.0,
            decode=lambda divisor, _: 1 / divisor,
            encode=lambda multiplier, _: 1 / multiplier,
        ),
    },
    fixed=decoder.FIXED,
    rules=decoder.RULES,
)
