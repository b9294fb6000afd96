"""Qwen3.5 with experts in every layer and a gated shared one."""

from isthmus.families.family import Derived, Family, Key
from isthmus.families.rules import decoder, delta_net, expert_tensors

FAMILY = Family(
    name="qwen3_5_moe_text",
    hf_architecture="Qwen3_5MoeForCausalLM",
    keys={name: key for name, key in decoder.KEYS.items() if name != "ffn_hidden_size"}
    | decoder.ATTENTION_BIAS
    | delta_net.KEYS
    | {
        "num_query_groups": decoder.kv_heads(default=2),
        "kv_channels": Key("head_dim", default=256),
        "max_position_embeddings": Key("max_position_embeddings", default=32768),
        "moe.num_experts": Key("num_experts", default=256, aliases=("num_local_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=8),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=512),
        "moe.shared_ffn_hidden_size": Key("shared_expert_intermediate_size", default=512),
    },
    fixed=decoder.FIXED | delta_net.QWEN_FIXED,
    traits=delta_net.QWEN_TRAITS | {"moe.shared_gate": True, "moe.normalize": True},
    derived={
        "mixers": delta_net.mixers("gated_delta_net"),
        # No layer has a dense block.
        "ffn_hidden_size": Derived(read=Key("moe_intermediate_size", default=512).read, write=lambda width, arch: {}),
    },
    rope_defaults=delta_net.QWEN_ROPE,
    rules=decoder.pre_norm_rules(
        attention=delta_net.qwen_mixers(delta_net.SEPARATE), mlp=expert_tensors.GATED_SHARED_MLP
    ),
)
