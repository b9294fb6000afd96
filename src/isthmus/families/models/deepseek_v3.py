"""DeepSeek-V3 and R1: multi-head latent attention, group-limited sigmoid routing with an expert bias, an MTP layer."""

from isthmus.families.family import Family, Fixed, with_defaults
from isthmus.families.rules import decoder, expert_tensors, mla, mtp
from isthmus.families.rules.decoder import flag

_LAYER = (*decoder.INPUT_NORM, *mla.ATTENTION, *expert_tensors.MLP)

FAMILY = Family(
    name="deepseek_v3",
    hf_architecture="DeepseekV3ForCausalLM",
    keys=with_defaults(mla.KEYS, max_position_embeddings=4096)
    | {"rotary_interleaved": flag("rope_interleave", default=True)}
    | with_defaults(
        expert_tensors.DEEPSEEK_KEYS,
        n_routed_experts=256,
        num_experts_per_tok=8,
        moe_intermediate_size=2048,
        routed_scaling_factor=2.5,
        n_group=8,
        topk_group=4,
    )
    | {"moe.dense_layers": expert_tensors.first_dense(default=3), "mtp_layers": mtp.KEY},
    fixed=mla.FIXED
    | {
        "scoring_func": Fixed(("sigmoid",), "the only score function of this family"),
        "topk_method": Fixed(("noaux_tc",), "the only expert selection of this family"),
    },
    traits={"moe.score": "sigmoid", "moe.expert_bias": True},
    derived=mla.DERIVED,
    rules=(*decoder.EMBEDDING, *_LAYER, *mtp.mtp_rules(_LAYER), *decoder.HEAD),
)
