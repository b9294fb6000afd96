"""Persimmon: LayerNorms, also of queries and keys, a squared ReLU, fused query, key and value, biases."""

from isthmus.families.family import Family, Key, without
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, in_layer, number
from isthmus.families.rules.rule import renamed

_QKV, _HF_QKV = "self_attention.linear_qkv.", "self_attn.query_key_value."
_ATTENTION = (
    # As in Megatron-Core, the rows of query, key and value are grouped by head.
    in_layer(_QKV + "weight", _HF_QKV + "weight", "W", "H", shard="heads"),
    in_layer(_QKV + "bias", _HF_QKV + "bias", "W", shard="heads", init="zeros"),
    decoder.PROJECTION,
    decoder.PROJECTION_BIAS,
    *decoder.QK_NORMS,
)

FAMILY = Family(
    name="persimmon",
    hf_architecture="PersimmonForCausalLM",
    keys=without(decoder.KEYS, "kv_channels")
    | {
        "num_query_groups": Key("num_attention_heads"),
        "max_position_embeddings": Key("max_position_embeddings", default=16384),
        "norm_epsilon": number("layer_norm_eps", 1e-5),
        "activation": decoder.activation("hidden_act", default="relu2"),
        "qk_norm": flag("qk_layernorm", default=True),
    },
    derived={"kv_channels": decoder.HEAD_DIM},
    fixed=decoder.PLAIN_FIXED | {"hidden_dropout": decoder.NO_MLP_DROPOUT},
    traits=decoder.BIASED | {"normalization": "LayerNorm", "gated": False},
    rope_defaults={"partial_rotary_factor": 0.5},
    rules=renamed(
        decoder.pre_norm_rules(attention=_ATTENTION),
        {
            "q_norm": "q_layernorm",
            "k_norm": "k_layernorm",
            "self_attn.o_proj": "self_attn.dense",
            "up_proj": "dense_h_to_4h",
            "down_proj": "dense_4h_to_h",
            "model.norm": "model.final_layernorm",
        },
    ),
)
