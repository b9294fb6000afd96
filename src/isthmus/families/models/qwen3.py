"""Qwen3, dense: norms on queries and keys, a head width of its own."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="qwen3",
    hf_architecture="Qwen3ForCausalLM",
    keys=decoder.KEYS
    | {
        "num_query_groups": decoder.kv_heads(default=32),
        "kv_channels": Key("head_dim", default=128),
        "max_position_embeddings": Key("max_position_embeddings", default=32768),
        "qkv_bias": flag("attention_bias"),
        "proj_bias": flag("attention_bias"),
    },
    fixed=decoder.FIXED,
    traits={"qk_norm": True},
    sliding_window="by_layer",
    sliding_window_default=4096,
    rules=(
        *decoder.EMBEDDING,
        *decoder.INPUT_NORM,
        *decoder.ATTENTION,
        *decoder.QKV_BIAS,
        *decoder.PROJ_BIAS,
        *decoder.QK_NORM,
        *decoder.GATED_MLP,
        *decoder.HEAD,
    ),
    ignorable=decoder.IGNORABLE,
)
