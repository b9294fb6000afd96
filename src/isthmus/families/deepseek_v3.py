"""DeepSeek-V3 and R1: latent attention, sigmoid routing with a bias among the best groups, a layer ahead."""

from isthmus.families import ahead, decoder, experts, latent
from isthmus.families.family import Family, Fixed, Key

_LAYER = (
    *decoder.INPUT_NORM,
    *latent.ATTENTION,
    *experts.NORM,
    *experts.DENSE,
    *experts.ROUTER,
    *experts.EXPERT_BIAS,
    *experts.EXPERTS,
    *experts.SHARED_EXPERTS,
)

FAMILY = Family(
    name="deepseek_v3",
    hf_architecture="DeepseekV3ForCausalLM",
    keys=latent.KEYS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=4096),
        "rotary_interleaved": Key("rope_interleave", kind=bool, default=True),
        "moe.num_experts": Key("n_routed_experts", default=256, aliases=("num_local_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=8),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=2048),
        "moe.shared_ffn_hidden_size": experts.shared_width("n_shared_experts", default=1),
        "moe.scaling_factor": Key("routed_scaling_factor", kind=float, default=2.5),
        "moe.normalize": Key("norm_topk_prob", kind=bool, default=True),
        "moe.num_groups": Key("n_group", default=8),
        "moe.group_top_k": Key("topk_group", default=4),
        "moe.dense_layers": experts.first_dense(default=3),
        "mtp_layers": ahead.KEY,
    },
    fixed=latent.FIXED
    | {
        "scoring_func": Fixed(("sigmoid",), "that is how the router of this family scores"),
        "topk_method": Fixed(("noaux_tc",), "that is how the router of this family chooses"),
    },
    traits={"moe.score": "sigmoid", "moe.expert_bias": True},
    derived=latent.DERIVED,
    rules=(*decoder.EMBEDDING, *_LAYER, *ahead.ahead(_LAYER), *decoder.HEAD),
    ignorable=decoder.IGNORABLE,
)
