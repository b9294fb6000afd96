"""GPT-NeoX and Pythia: parallel attention and MLP, partial rotary embedding, fused query, key and value."""

from isthmus.families.family import IGNORABLE, Derived, Family, Key, dropout_rates, without
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, in_layer, number
from isthmus.families.rules.rule import renamed

_QKV, _HF_QKV = "self_attention.linear_qkv.", "attention.query_key_value."
_NAMES = {
    "model.embed_tokens": "gpt_neox.embed_in",
    "model.layers": "gpt_neox.layers",
    "self_attn.o_proj": "attention.dense",
    "up_proj": "dense_h_to_4h",
    "down_proj": "dense_4h_to_h",
    "model.norm": "gpt_neox.final_layer_norm",
    "lm_head": "embed_out",
}
_ATTENTION = (
    # As in Megatron-Core, the rows of query, key and value are grouped by head.
    in_layer(_QKV + "weight", _HF_QKV + "weight", "W", "H", shard="heads"),
    in_layer(_QKV + "bias", _HF_QKV + "bias", "W", shard="heads", init="zeros", when="qkv_bias"),
    decoder.PROJECTION,
    decoder.PROJECTION_BIAS,
)

FAMILY = Family(
    name="gpt_neox",
    hf_architecture="GPTNeoXForCausalLM",
    keys=without(decoder.KEYS, "kv_channels")
    | {
        "num_query_groups": Key("num_attention_heads"),
        "max_position_embeddings": Key("max_position_embeddings", default=2048),
        "norm_epsilon": number("layer_norm_eps", 1e-5),
        "activation": decoder.activation("hidden_act", default="gelu"),
        "qkv_bias": flag("attention_bias", default=True),
        "proj_bias": flag("attention_bias", default=True),
        "form": Key("use_parallel_residual", default=True, choices={True: "parallel_two_norms", False: "pre"}),
    },
    derived={
        "kv_channels": Derived(lambda hf: hf["hidden_size"] // hf["num_attention_heads"], lambda _width, _arch: {})
    },
    traits={"normalization": "LayerNorm", "gated": False, "mlp_bias": True},
    fixed=decoder.PLAIN_FIXED,
    dropout=dropout_rates(attention="attention_dropout", hidden="hidden_dropout", embedding="hidden_dropout"),
    rope_defaults={"partial_rotary_factor": 0.25},
    rope_names={"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"},
    rules=renamed(decoder.pre_norm_rules(attention=_ATTENTION), _NAMES),
    ignorable=(*IGNORABLE, "attention.bias", "attention.masked_bias"),
)
