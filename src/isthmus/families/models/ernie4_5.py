"""ERNIE 4.5, dense: Llama with interleaved rotary embedding."""

from isthmus.families.family import Family, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="ernie4_5",
    hf_architecture="Ernie4_5ForCausalLM",
    keys=with_defaults(
        decoder.KEYS,
        head_dim=128,
        num_key_value_heads=2,
        max_position_embeddings=131072,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
    )
    | {"qkv_bias": flag("use_bias"), "proj_bias": flag("use_bias"), "mlp_bias": flag("use_bias")},
    fixed=decoder.FIXED,
    traits={"rotary_interleaved": True},
    dropout={},
    rope_defaults={"rope_theta": 500000.0},
    rules=decoder.RULES,
)
