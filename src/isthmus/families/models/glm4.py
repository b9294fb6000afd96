"""GLM-4 0414, dense: norms before and after attention and MLP, partial interleaved rotary embedding."""

from isthmus.families.family import Family, Key, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag, layer_norm

FAMILY = Family(
    name="glm4",
    hf_architecture="Glm4ForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=2, max_position_embeddings=131072, rms_norm_eps=0.00000015625)
    | {"kv_channels": Key("head_dim", default=128), "qkv_bias": flag("attention_bias", default=True)},
    fixed=decoder.FIXED,
    traits={"form": "sandwich", "rotary_interleaved": True},
    rope_defaults={"partial_rotary_factor": 0.5},
    rules=decoder.pre_norm_rules(
        attention=(*decoder.ATTENTION, *layer_norm("post_self_attn_layernorm")),
        mlp=(*decoder.FUSED_MLP, *layer_norm("post_mlp_layernorm")),
    ),
)
