"""GLM-4.5 and 4.6: sigmoid routing with an expert bias, partial rotary embedding, optional QK norms, an MTP layer."""

from isthmus.families.family import Family, with_defaults
from isthmus.families.rules import decoder, expert_tensors, mtp
from isthmus.families.rules.decoder import flag

_LAYER = (*decoder.INPUT_NORM, *decoder.ATTENTION, *expert_tensors.MLP)

FAMILY = Family(
    name="glm4_moe",
    hf_architecture="Glm4MoeForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5)
    | {"qkv_bias": flag("attention_bias"), "qk_norm": flag("use_qk_norm")}
    | with_defaults(
        expert_tensors.DEEPSEEK_KEYS, n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1408
    )
    | {"moe.dense_layers": expert_tensors.first_dense(default=1), "mtp_layers": mtp.KEY},
    fixed=decoder.FIXED,
    traits={"moe.score": "sigmoid", "moe.expert_bias": True},
    rope_defaults={"partial_rotary_factor": 0.5},
    rules=(*decoder.EMBEDDING, *_LAYER, *mtp.mtp_rules(_LAYER), *decoder.HEAD),
)
