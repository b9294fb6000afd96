"""OLMo 2: norms behind attention and MLP, and over all heads of queries and of keys together."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag
from isthmus.families.rules.rule import copy

_LAYER, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."

FAMILY = Family(
    name="olmo2",
    hf_architecture="Olmo2ForCausalLM",
    keys=decoder.KEYS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=2048),
        "norm_epsilon": Key("rms_norm_eps", kind=float, default=1e-5),
        "qkv_bias": flag("attention_bias"),
        "proj_bias": flag("attention_bias"),
    },
    fixed=decoder.FIXED,
    traits={"form": "post", "qk_norm": True, "qk_norm_over": "projection"},
    rules=(
        *decoder.EMBEDDING,
        *decoder.ATTENTION,
        *decoder.QKV_BIAS,
        *decoder.PROJ_BIAS,
        copy(_LAYER + "self_attention.q_layernorm.weight", _HF + "self_attn.q_norm.weight", "N*D", init="ones"),
        copy(_LAYER + "self_attention.k_layernorm.weight", _HF + "self_attn.k_norm.weight", "G*D", init="ones"),
        copy(_LAYER + "post_self_attn_layernorm.weight", _HF + "post_attention_layernorm.weight", "H", init="ones"),
        *decoder.GATED_MLP[1:],
        copy(_LAYER + "post_mlp_layernorm.weight", _HF + "post_feedforward_layernorm.weight", "H", init="ones"),
        *decoder.HEAD,
    ),
    ignorable=decoder.IGNORABLE,
)
