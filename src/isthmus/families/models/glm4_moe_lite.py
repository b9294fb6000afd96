"""GLM-4.7-Flash: multi-head latent attention, sigmoid routing with an expert bias, an MTP layer."""

from dataclasses import replace

from isthmus.families.family import Family, Key, with_defaults, without
from isthmus.families.rules import decoder, expert_tensors, mla, mtp
from isthmus.families.rules.decoder import flag

_LAYER = (*decoder.INPUT_NORM, *mla.ATTENTION, *expert_tensors.MLP)

FAMILY = Family(
    name="glm4_moe_lite",
    hf_architecture="Glm4MoeLiteForCausalLM",
    keys=with_defaults(mla.KEYS, max_position_embeddings=202752, rms_norm_eps=1e-5)
    | {
        "rotary_interleaved": flag("rope_interleave", default=True),
        "mla.q_lora_rank": Key("q_lora_rank", default=768, optional=True),
        "mla.qk_nope_head_dim": Key("qk_nope_head_dim", default=192),
        "mla.v_head_dim": Key("v_head_dim", default=256),
    }
    | with_defaults(
        expert_tensors.DEEPSEEK_KEYS,
        n_routed_experts=64,
        num_experts_per_tok=4,
        moe_intermediate_size=1536,
        routed_scaling_factor=1.8,
    )
    | {"mtp_layers": replace(mtp.KEY, default=0)},
    fixed=without(mla.FIXED, "moe_layer_freq"),
    traits={"moe.score": "sigmoid", "moe.expert_bias": True},
    derived=mla.DERIVED | {"moe.dense_layers": expert_tensors.mlp_layer_types(dense=1)},
    rules=(*decoder.EMBEDDING, *_LAYER, *mtp.mtp_rules(_LAYER), *decoder.HEAD),
)
