"""Qwen3.5 with experts in every layer and a gated shared one."""

from isthmus.families.family import Derived, Family, Key, with_defaults, without
from isthmus.families.rules import decoder, delta_net, expert_tensors

FAMILY = Family(
    name="qwen3_5_moe_text",
    hf_architecture="Qwen3_5MoeForCausalLM",
    keys=with_defaults(without(decoder.KEYS, "ffn_hidden_size"), num_key_value_heads=2, max_position_embeddings=32768)
    | decoder.ATTENTION_BIAS
    | delta_net.KEYS
    | {"kv_channels": Key("head_dim", default=256)}
    | with_defaults(expert_tensors.KEYS, num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512)
    | {"moe.shared_ffn_hidden_size": Key("shared_expert_intermediate_size", default=512)},
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
