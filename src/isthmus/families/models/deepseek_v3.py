"""DeepSeek-V3 and R1: multi-head latent attention, group-limited sigmoid routing with an expert bias, an MTP layer."""

from isthmus.families.family import Family, Fixed, Key
from isthmus.families.rules import decoder, expert_tensors, mla, mtp
from isthmus.families.rules.decoder import flag, number

_LAYER = (*decoder.INPUT_NORM, *mla.ATTENTION, *expert_tensors.MLP)

FAMILY = Family(
    name="deepseek_v3",
    hf_architecture="DeepseekV3ForCausalLM",
    keys=mla.KEYS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=4096),
        "rotary_interleaved": flag("rope_interleave", default=True),
        "moe.num_experts": Key("n_routed_experts", default=256, aliases=("num_local_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=8),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=2048),
        "moe.shared_ffn_hidden_size": expert_tensors.shared_width("n_shared_experts", default=1),
        "moe.scaling_factor": number("routed_scaling_factor", 2.5),
        "moe.normalize": flag("norm_topk_prob", default=True),
        "moe.num_groups": Key("n_group", default=8),
        "moe.group_top_k": Key("topk_group", default=4),
        "moe.dense_layers": expert_tensors.first_dense(default=3),
        "mtp_layers": mtp.KEY,
    },
    fixed=mla.FIXED
    | {
        "scoring_func": Fixed(("sigmoid",), "the only score function of this family"),
        "topk_method": Fixed(("noaux_tc",), "the only expert selection of this family"),
    },
    traits={"moe.score": "sigmoid", "moe.expert_bias": True},
    derived=mla.DERIVED,
    rules=(*decoder.EMBEDDING, *_LAYER, *mtp.mtp_rules(_LAYER), *decoder.HEAD),
)
