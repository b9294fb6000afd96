"""Solar Open: Llama's attention, experts of DeepSeek-V3 in every layer."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag, number

FAMILY = Family(
    name="solar_open",
    hf_architecture="SolarOpenForCausalLM",
    keys=decoder.KEYS
    | {
        "ffn_hidden_size": Key("moe_intermediate_size", default=1280),
        "num_query_groups": Key("num_key_value_heads", default=8),
        "kv_channels": Key("head_dim", default=128),
        "max_position_embeddings": Key("max_position_embeddings", default=131072),
        "norm_epsilon": number("rms_norm_eps", 1e-5),
        "qkv_bias": flag("attention_bias"),
        "moe.num_experts": Key("n_routed_experts", default=128, aliases=("num_local_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=8),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=1280),
        "moe.shared_ffn_hidden_size": expert_tensors.shared_width("n_shared_experts", default=1),
        "moe.scaling_factor": number("routed_scaling_factor", 1.0),
        "moe.normalize": flag("norm_topk_prob", default=True),
        "moe.num_groups": Key("n_group", default=1),
        "moe.group_top_k": Key("topk_group", default=1),
    },
    fixed=decoder.FIXED,
    traits={"moe.score": "sigmoid", "moe.expert_bias": True},
    rope_defaults={"rope_theta": 1000000.0},
    rules=expert_tensors.RULES,
)
