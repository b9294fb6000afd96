"""LFM2 with experts: a sigmoid router with a selection bias, after some dense layers."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import expert_tensors, short_convolution
from isthmus.families.rules.decoder import flag, number
from isthmus.families.rules.rule import renamed

FAMILY = Family(
    name="lfm2_moe",
    hf_architecture="Lfm2MoeForCausalLM",
    keys=short_convolution.KEYS
    | {
        "ffn_hidden_size": Key("intermediate_size", default=7168),
        "moe.num_experts": Key("num_experts", default=32),
        "moe.top_k": Key("num_experts_per_tok", default=4),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=1792),
        "moe.normalize": flag("norm_topk_prob", default=True),
        "moe.expert_bias": flag("use_expert_bias", default=True),
        "moe.scaling_factor": number("routed_scaling_factor", 1.0),
        "moe.dense_layers": expert_tensors.first_dense(default=2, key="num_dense_layers"),
    },
    derived=short_convolution.DERIVED,
    rules=short_convolution.rules(
        renamed(
            (*expert_tensors.DENSE, *expert_tensors.ROUTER, *expert_tensors.EXPERT_BIAS, *expert_tensors.EXPERTS),
            {"gate.e_score_correction_bias": "expert_bias"},
        )
    ),
    **short_convolution.SHARED
    | {"traits": short_convolution.SHARED["traits"] | {"moe.score": "sigmoid", "moe.normalize_offset": 1e-6}},
)
