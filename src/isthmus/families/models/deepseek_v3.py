"""DeepSeek-V3 and R1: latent attention, sigmoid routing with a bias among the best groups, an MTP layer."""

from isthmus.families.family import Family, Fixed, Key
from isthmus.families.rules import decoder, expert_tensors, mla, mtp

_LAYER = (
    *decoder.INPUT_NORM,
    *mla.ATTENTION,
    *expert_tensors.NORM,
    *expert_tensors.DENSE,
    *expert_tensors.ROUTER,
    *expert_tensors.EXPERT_BIAS,
    *expert_tensors.EXPERTS,
    *expert_tensors.SHARED_EXPERTS,
)

FAMILY = Family(
    name="deepseek_v3",
    hf_architecture="DeepseekV3ForCausalLM",
    keys=mla.KEYS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=4096),
        "rotary_interleaved": Key("rope_interleave", kind=bool, default=True),
        "moe.num_experts": Key("n_routed_experts", default=256, aliases=("num_local_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=8),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=2048),
        "moe.shared_ffn_hidden_size": expert_tensors.shared_width("n_shared_experts", default=1),
        "moe.scaling_factor": Key("routed_scaling_factor", kind=float, default=2.5),
        "moe.normalize": Key("norm_topk_prob", kind=bool, default=True),
        "moe.num_groups": Key("n_group", default=8),
        "moe.group_top_k": Key("topk_group", default=4),
        "moe.dense_layers": expert_tensors.first_dense(default=3),
        "mtp_layers": mtp.KEY,
    },
    fixed=mla.FIXED
    | {
        "scoring_func": Fixed(("sigmoid",), "that is how the router of this family scores"),
        "topk_method": Fixed(("noaux_tc",), "that is how the router of this family chooses"),
    },
    traits={"moe.score": "sigmoid", "moe.expert_bias": True},
    derived=mla.DERIVED,
    rules=(*decoder.EMBEDDING, *_LAYER, *mtp.ahead(_LAYER), *decoder.HEAD),
    ignorable=decoder.IGNORABLE,
)
