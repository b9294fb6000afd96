"""ERNIE 4.5, dense: Llama with interleaved rotary embedding."""

from isthmus.families.family import Family, Key, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="ernie4_5",
    hf_architecture="Ernie4_5ForCausalLM",
    keys=with_defaults(
        decoder.KEYS, num_key_value_heads=2, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True
    )
    | {
        "kv_channels": Key("head_dim", default=128, null=lambda hf: hf["hidden_size"] // hf["num_attention_heads"]),
        "qkv_bias": flag("use_bias"),
        "proj_bias": flag("use_bias"),
        "mlp_bias": flag("use_bias"),
    },
    fixed=decoder.FIXED,
    traits={"rotary_interleaved": True},
    dropout={},
    rope_defaults={"rope_theta": 500000.0},
    rules=decoder.RULES,
)
