"""Seed-OSS: Llama's tensors, with separate switches for the biases of attention inputs and output."""

from isthmus.families.family import Family, dropout_rates, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="seed_oss",
    hf_architecture="SeedOssForCausalLM",
    keys=with_defaults(decoder.KEYS, head_dim=128, num_key_value_heads=8, max_position_embeddings=524288)
    | {
        "qkv_bias": flag("attention_bias", default=True),
        "proj_bias": flag("attention_out_bias"),
        "mlp_bias": flag("mlp_bias"),
    },
    fixed=decoder.FIXED,
    dropout=dropout_rates(0.1, attention="attention_dropout", hidden="residual_dropout"),
    rules=decoder.RULES,
)
