"""Mixtral 8x7B and 8x22B: Mistral's attention, experts in every layer."""

from isthmus.families.family import Family, Fixed, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.rule import renamed

NAMES = {".mlp.": ".block_sparse_moe.", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}

FAMILY = Family(
    name="mixtral",
    hf_architecture="MixtralForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5)
    | {
        "moe.ffn_hidden_size": Key("intermediate_size"),
        "moe.num_experts": Key("num_local_experts", default=8),
        "moe.top_k": Key("num_experts_per_tok", default=2),
    },
    fixed=decoder.FIXED
    | {"router_jitter_noise": Fixed((0.0,), "training runs without noise; set it to 0", training=True)},
    traits={"moe.normalize": True},
    sliding_window="always",
    rope_defaults={"rope_theta": 1e6},
    module_names={".block_sparse_moe.": ".mlp."},
    rules=decoder.pre_norm_rules(mlp=renamed((*expert_tensors.ROUTER, *expert_tensors.EXPERTS), NAMES)),
)
