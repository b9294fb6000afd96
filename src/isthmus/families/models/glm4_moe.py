"""GLM-4.5 and 4.6: sigmoid routing with an expert bias, partial rotary embedding, optional QK norms, an MTP layer."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder, expert_tensors, mtp
from isthmus.families.rules.decoder import flag, number

_LAYER = (*decoder.INPUT_NORM, *decoder.ATTENTION, *expert_tensors.MLP)

FAMILY = Family(
    name="glm4_moe",
    hf_architecture="Glm4MoeForCausalLM",
    keys=decoder.KEYS
    | {
        "num_query_groups": decoder.kv_heads(default=8),
        "max_position_embeddings": Key("max_position_embeddings", default=131072),
        "norm_epsilon": number("rms_norm_eps", 1e-5),
        "qkv_bias": flag("attention_bias"),
        "qk_norm": flag("use_qk_norm"),
        "moe.num_experts": Key("n_routed_experts", default=128, aliases=("num_local_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=8),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=1408),
        "moe.shared_ffn_hidden_size": expert_tensors.shared_width("n_shared_experts", default=1),
        "moe.scaling_factor": number("routed_scaling_factor", 1.0),
        "moe.normalize": flag("norm_topk_prob", default=True),
        "moe.num_groups": Key("n_group", default=1),
        "moe.group_top_k": Key("topk_group", default=1),
        "moe.dense_layers": expert_tensors.first_dense(default=1),
        "mtp_layers": mtp.KEY,
    },
    fixed=decoder.FIXED,
    traits={"moe.score": "sigmoid", "moe.expert_bias": True},
    rope_defaults={"partial_rotary_factor": 0.5},
    rules=(*decoder.EMBEDDING, *_LAYER, *mtp.mtp_rules(_LAYER), *decoder.HEAD),
)
