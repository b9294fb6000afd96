"""Seed-OSS: Llama's tensors, with separate switches for the biases of attention inputs and output."""

from isthmus.families.family import Family, Key, dropout_rate
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="seed_oss",
    hf_architecture="SeedOssForCausalLM",
    keys=decoder.KEYS
    | {
        "num_query_groups": decoder.kv_heads(default=8),
        "kv_channels": Key("head_dim", default=128, null=lambda hf: hf["hidden_size"] // hf["num_attention_heads"]),
        "max_position_embeddings": Key("max_position_embeddings", default=524288),
        "qkv_bias": flag("attention_bias", default=True),
        "proj_bias": flag("attention_out_bias"),
        "mlp_bias": flag("mlp_bias"),
    },
    fixed=decoder.FIXED,
    dropout={"attention": dropout_rate("attention_dropout", 0.1), "hidden": dropout_rate("residual_dropout", 0.1)},
    rules=decoder.RULES,
)
