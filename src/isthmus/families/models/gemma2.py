"""Gemma 2: norms before and after attention and MLP, soft-capped scores and logits, alternating sliding window."""

from isthmus.families.family import Family, Key
from isthmus.families.models import gemma
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import layer_norm, number

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
RULES = (
    *decoder.EMBEDDING,
    *decoder.INPUT_NORM,
    *decoder.ATTENTION,
    *layer_norm("post_self_attn_layernorm", "post_attention_layernorm"),
    *layer_norm("pre_mlp_layernorm", "pre_feedforward_layernorm"),
    *layer_norm("post_mlp_layernorm", "post_feedforward_layernorm"),
    *decoder.MLP,
    *decoder.HEAD,
)

FAMILY = Family(
    name="gemma2",
    hf_architecture="Gemma2ForCausalLM",
    keys=KEYS
    | {
        "attention_softcap": number("attn_logit_softcapping", 50.0, optional=True),
        "logits_softcap": number("final_logit_softcapping", 30.0, optional=True),
    },
    derived={"embedding_multiplier": gemma.EMBEDDING_SCALE},
    fixed=decoder.PLAIN_FIXED | {"use_bidirectional_attention": gemma.CAUSAL},
    traits={"form": "sandwich", "norm_zero_centered": True},
    sliding_window="pattern",
    sliding_window_default=4096,
    sliding_window_pattern=2,
    rules=RULES,
)
