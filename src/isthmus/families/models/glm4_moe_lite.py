"""GLM-4.7-Flash: multi-head latent attention, sigmoid routing with an expert bias, an MTP layer."""

from dataclasses import replace

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder, expert_tensors, mla, mtp
from isthmus.families.rules.decoder import flag, number

_LAYER = (*decoder.INPUT_NORM, *mla.ATTENTION, *expert_tensors.MLP)

FAMILY = Family(
    name="glm4_moe_lite",
    hf_architecture="Glm4MoeLiteForCausalLM",
    keys=mla.KEYS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=202752),
        "norm_epsilon": number("rms_norm_eps", 1e-5),
        "rotary_interleaved": flag("rope_interleave", default=True),
        "mla.q_lora_rank": Key("q_lora_rank", default=768, optional=True),
        "mla.qk_nope_head_dim": Key("qk_nope_head_dim", default=192),
        "mla.v_head_dim": Key("v_head_dim", default=256),
        "moe.num_experts": Key("n_routed_experts", default=64, aliases=("num_local_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=4),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=1536),
        "moe.shared_ffn_hidden_size": expert_tensors.shared_width("n_shared_experts", default=1),
        "moe.scaling_factor": number("routed_scaling_factor", 1.8),
        "moe.normalize": flag("norm_topk_prob", default=True),
        "moe.num_groups": Key("n_group", default=1),
        "moe.group_top_k": Key("topk_group", default=1),
        "mtp_layers": replace(mtp.KEY, default=0),
    },
    fixed={name: fixed for name, fixed in mla.FIXED.items() if name != "moe_layer_freq"},
    traits={"moe.score": "sigmoid", "moe.expert_bias": True},
    derived=mla.DERIVED | {"moe.dense_layers": expert_tensors.mlp_layer_types(dense=1)},
    rules=(*decoder.EMBEDDING, *_LAYER, *mtp.mtp_rules(_LAYER), *decoder.HEAD),
)
