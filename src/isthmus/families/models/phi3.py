"""Phi-3 and Phi-4, dense: fused projections, LongRoPE, partial rotary embedding."""

from isthmus.families.family import Family, dropout_rates, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.rule import qkv

_QKV = "model.layers.{layer}.self_attn.qkv_proj.weight"

FAMILY = Family(
    name="phi3",
    hf_architecture="Phi3ForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=4096, rms_norm_eps=1e-5),
    fixed=decoder.FIXED,
    # As transformers, without embd_pdrop, which its model does not use.
    dropout=dropout_rates(attention="attention_dropout", hidden="resid_pdrop"),
    sliding_window="always",
    # The config has the original length twice; the one outside the rotary settings has precedence.
    rope_defaults={"original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0},
    rules=decoder.pre_norm_rules(
        attention=(qkv(decoder.LAYER + "self_attention.linear_qkv.weight", *(_QKV,) * 3, "H"), decoder.PROJECTION),
        mlp=decoder.FUSED_MLP,
    ),
)
