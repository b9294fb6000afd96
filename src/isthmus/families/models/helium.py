"""Helium: Llama with interleaved rotary embedding."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number

FAMILY = Family(
    name="helium",
    hf_architecture="HeliumForCausalLM",
    keys=decoder.KEYS
    | {
        "num_query_groups": decoder.kv_heads(default=20),
        "kv_channels": Key("head_dim", default=128),
        "max_position_embeddings": Key("max_position_embeddings", default=4096),
        "norm_epsilon": number("rms_norm_eps", 1e-8),
        "qkv_bias": flag("attention_bias"),
        "mlp_bias": flag("mlp_bias"),
    },
    fixed=decoder.FIXED,
    traits={"rotary_interleaved": True},
    rope_defaults={"rope_theta": 100000.0},
    rules=decoder.RULES,
)
