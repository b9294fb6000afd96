"""GLM-4.5 and 4.6: sigmoid routing with a bias, half of each head rotated, norms on queries and keys if asked for."""

from dataclasses import replace

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder, expert_tensors, mtp
from isthmus.families.rules.decoder import flag

_LAYER = (
    *decoder.INPUT_NORM,
    *decoder.ATTENTION,
    *decoder.QKV_BIAS,
    *(replace(rule, when="qk_norm") for rule in decoder.QK_NORM),
    *expert_tensors.NORM,
    *expert_tensors.DENSE,
    *expert_tensors.ROUTER,
    *expert_tensors.EXPERT_BIAS,
    *expert_tensors.EXPERTS,
    *expert_tensors.SHARED_EXPERTS,
)

FAMILY = Family(
    name="glm4_moe",
    hf_architecture="Glm4MoeForCausalLM",
    keys=decoder.KEYS
    | {
        "num_query_groups": decoder.kv_heads(default=8),
        "max_position_embeddings": Key("max_position_embeddings", default=131072),
        "norm_epsilon": Key("rms_norm_eps", kind=float, default=1e-5),
        "qkv_bias": flag("attention_bias"),
        "qk_norm": flag("use_qk_norm"),
        "moe.num_experts": Key("n_routed_experts", default=128, aliases=("num_local_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=8),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=1408),
        "moe.shared_ffn_hidden_size": expert_tensors.shared_width("n_shared_experts", default=1),
        "moe.scaling_factor": Key("routed_scaling_factor", kind=float, default=1.0),
        "moe.normalize": flag("norm_topk_prob", default=True),
        "moe.num_groups": Key("n_group", default=1),
        "moe.group_top_k": Key("topk_group", default=1),
        "moe.dense_layers": expert_tensors.first_dense(default=1),
        "mtp_layers": mtp.KEY,
    },
    fixed=decoder.FIXED,
    traits={"moe.score": "sigmoid", "moe.expert_bias": True},
    rope_defaults={"partial_rotary_factor": 0.5},
    rules=(*decoder.EMBEDDING, *_LAYER, *mtp.ahead(_LAYER), *decoder.HEAD),
    ignorable=decoder.IGNORABLE,
)
