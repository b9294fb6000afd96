"""Hunyuan V3: QK norms, sigmoid routing with an expert bias, shared experts, an MTP layer."""

from dataclasses import replace

from isthmus.families.family import Family, Fixed, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors, mtp
from isthmus.families.rules.decoder import number
from isthmus.families.rules.rule import renamed

_NAMES = {
    "mlp.gate.e_score_correction_bias": "mlp.expert_bias",
    "mlp.gate.": "mlp.router.gate.",
    "mlp.shared_experts.": "mlp.shared_mlp.",
}
_LAYER = (*decoder.INPUT_NORM, *decoder.ATTENTION, *renamed(expert_tensors.MLP, _NAMES))
_MTP = renamed(mtp.mtp_rules(_LAYER, copies=False), {"shared_head.norm": "final_layernorm"})

FAMILY = Family(
    name="hy_v3",
    hf_architecture="HYV3ForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=131072, rms_norm_eps=1e-5, initializer_range=0.006)
    | decoder.ATTENTION_BIAS
    | {"num_query_groups": Key("num_key_value_heads", default=8), "kv_channels": Key("head_dim", default=128)}
    | with_defaults(expert_tensors.KEYS, num_experts=192, num_experts_per_tok=8, moe_intermediate_size=1536)
    | {
        "moe.shared_ffn_hidden_size": expert_tensors.shared_width("num_shared_experts", default=1),
        "moe.scaling_factor": number("router_scaling_factor", 2.826),
        "mtp_layers": replace(mtp.KEY, default=0),
    },
    fixed=decoder.FIXED | {"mlp_bias": Fixed((False,), "only dense blocks and shared experts would have biases")},
    traits={"qk_norm": True, "moe.score": "sigmoid", "moe.expert_bias": True, "moe.normalize": True},
    derived={"moe.dense_layers": expert_tensors.mlp_layer_types(dense=1)},
    rope_defaults={"rope_theta": 11158840.0},
    module_names={new: old for old, new in _NAMES.items()},
    rules=(*decoder.EMBEDDING, *_LAYER, *_MTP, *decoder.HEAD),
)
