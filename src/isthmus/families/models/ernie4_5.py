"""ERNIE 4.5, dense: Llama with interleaved rotary embedding."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, number

FAMILY = Family(
    name="ernie4_5",
    hf_architecture="Ernie4_5ForCausalLM",
    keys=decoder.KEYS
    | {
        "num_query_groups": decoder.kv_heads(default=2),
        "kv_channels": Key("head_dim", default=128, null=lambda hf: hf["hidden_size"] // hf["num_attention_heads"]),
        "max_position_embeddings": Key("max_position_embeddings", default=131072),
        "norm_epsilon": number("rms_norm_eps", 1e-5),
        "qkv_bias": flag("use_bias"),
        "proj_bias": flag("use_bias"),
        "mlp_bias": flag("use_bias"),
        "tie_embeddings": flag("tie_word_embeddings", default=True),
    },
    fixed=decoder.FIXED,
    traits={"rotary_interleaved": True},
    dropout={},
    rope_defaults={"rope_theta": 500000.0},
    rules=decoder.RULES,
)
