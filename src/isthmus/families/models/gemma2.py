"""Gemma 2: norms on both sides of attention and MLP, scores and logits capped, a window in every other layer."""

from isthmus.families.family import Family, Key
from isthmus.families.models import gemma
from isthmus.families.rules import decoder
from isthmus.families.rules.rule import copy

_LAYER, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."

KEYS = gemma.KEYS | {
    "num_query_groups": decoder.kv_heads(default=4),
    "activation": decoder.activation("hidden_activation", default="gelu_pytorch_tanh"),
    "attention_scale": Key(
        "query_pre_attn_scalar",
        kind=float,
        default=256,
        decode=lambda width, _: width**-0.5,
        encode=lambda scale, _: round(scale**-2),
    ),
}
NORMS = (
    copy(_LAYER + "post_self_attn_layernorm.weight", _HF + "post_attention_layernorm.weight", "H", init="ones"),
    copy(_LAYER + "pre_mlp_layernorm.weight", _HF + "pre_feedforward_layernorm.weight", "H", init="ones"),
    copy(_LAYER + "post_mlp_layernorm.weight", _HF + "post_feedforward_layernorm.weight", "H", init="ones"),
)

FAMILY = Family(
    name="gemma2",
    hf_architecture="Gemma2ForCausalLM",
    keys=KEYS
    | {
        "attention_softcap": Key("attn_logit_softcapping", kind=float, default=50.0, optional=True),
        "logits_softcap": Key("final_logit_softcapping", kind=float, default=30.0, optional=True),
    },
    derived={"embedding_multiplier": gemma.EMBEDDING_SCALE},
    fixed=decoder.PLAIN_FIXED | {"use_bidirectional_attention": gemma.CAUSAL},
    traits={"form": "sandwich", "norm_zero_centered": True},
    sliding_window="pattern",
    sliding_window_default=4096,
    sliding_window_pattern=2,
    rules=(
        *decoder.EMBEDDING,
        *decoder.INPUT_NORM,
        *decoder.ATTENTION,
        *decoder.QKV_BIAS,
        *decoder.PROJ_BIAS,
        *NORMS,
        *decoder.GATED_MLP[1:],
        *decoder.HEAD,
    ),
    ignorable=decoder.IGNORABLE,
)
