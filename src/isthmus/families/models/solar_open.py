"""Solar Open: Llama's attention, experts of DeepSeek-V3 in every layer."""

from isthmus.families.family import Family, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import flag

FAMILY = Family(
    name="solar_open",
    hf_architecture="SolarOpenForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=131072, rms_norm_eps=1e-5)
    | {
        "ffn_hidden_size": Key("moe_intermediate_size", default=1280),
        "num_query_groups": Key("num_key_value_heads", default=8),
        "kv_channels": Key("head_dim", default=128),
        "qkv_bias": flag("attention_bias"),
    }
    | with_defaults(
        expert_tensors.DEEPSEEK_KEYS, n_routed_experts=128, num_experts_per_tok=8, moe_intermediate_size=1280
    ),
    fixed=decoder.FIXED,
    traits={"moe.score": "sigmoid", "moe.expert_bias": True},
    rope_defaults={"rope_theta": 1000000.0},
    rules=expert_tensors.RULES,
)
