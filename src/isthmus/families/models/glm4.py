"""GLM-4 0414, dense: norms on both sides of attention and MLP, half of each head rotated, in pairs of neighbours."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import flag
from isthmus.families.rules.rule import copy

_LAYER, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."

FAMILY = Family(
    name="glm4",
    hf_architecture="Glm4ForCausalLM",
    keys=decoder.KEYS
    | {
        "num_query_groups": decoder.kv_heads(default=2),
        "kv_channels": Key("head_dim", default=128),
        "max_position_embeddings": Key("max_position_embeddings", default=131072),
        "norm_epsilon": Key("rms_norm_eps", kind=float, default=0.00000015625),
        "qkv_bias": flag("attention_bias", default=True),
    },
    fixed=decoder.FIXED,
    traits={"form": "sandwich", "rotary_interleaved": True},
    rope_defaults={"partial_rotary_factor": 0.5},
    rules=(
        *decoder.EMBEDDING,
        *decoder.INPUT_NORM,
        *decoder.ATTENTION,
        *decoder.QKV_BIAS,
        copy(_LAYER + "post_self_attn_layernorm.weight", _HF + "post_self_attn_layernorm.weight", "H", init="ones"),
        *decoder.FUSED_GATED_MLP,
        copy(_LAYER + "post_mlp_layernorm.weight", _HF + "post_mlp_layernorm.weight", "H", init="ones"),
        *decoder.HEAD,
    ),
    ignorable=decoder.IGNORABLE,
)
