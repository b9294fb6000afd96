"""Helium: Llama with interleaved rotary embedding."""

from isthmus.families.family import Family, Key, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="helium",
    hf_architecture="HeliumForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=20, max_position_embeddings=4096, rms_norm_eps=1e-8)
    | {"kv_channels": Key("head_dim", default=128), "qkv_bias": flag("attention_bias"), "mlp_bias": flag("mlp_bias")},
    fixed=decoder.FIXED,
    traits={"rotary_interleaved": True},
    rope_defaults={"rope_theta": 100000.0},
    rules=decoder.RULES,
)
