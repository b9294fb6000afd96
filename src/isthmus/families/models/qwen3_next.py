"""Qwen3-Next: gated delta nets, every fourth layer gated attention; many small experts and a gated shared one."""

from isthmus.families.family import Family, Key, with_defaults
from isthmus.families.rules import decoder, delta_net, expert_tensors
from isthmus.families.rules.decoder import flag

_PROJECTION = delta_net.in_proj(
    *(("in_proj_qkvz", rows) for rows in ("Lk", "Lk", "Lv", "Lv")), *(("in_proj_ba", "Ln"),) * 2, hf_strands="Lm"
)

FAMILY = Family(
    name="qwen3_next",
    hf_architecture="Qwen3NextForCausalLM",
    keys=with_defaults(decoder.KEYS, num_key_value_heads=2, max_position_embeddings=32768)
    | decoder.ATTENTION_BIAS
    | delta_net.KEYS
    | {"kv_channels": Key("head_dim", default=256)}
    | with_defaults(expert_tensors.KEYS, num_experts=512, num_experts_per_tok=10, moe_intermediate_size=512)
    | {
        "moe.shared_ffn_hidden_size": Key("shared_expert_intermediate_size", default=512),
        "moe.normalize": flag("norm_topk_prob", default=True),
    },
    fixed=decoder.FIXED | delta_net.QWEN_FIXED,
    traits=delta_net.QWEN_TRAITS | {"moe.shared_gate": True},
    derived={"moe.dense_layers": expert_tensors.sparse_step(), "mixers": delta_net.mixers("gated_delta_net")},
    rope_defaults=delta_net.QWEN_ROPE,
    passed_through=("mtp.*",),
    rules=decoder.pre_norm_rules(attention=delta_net.qwen_mixers(_PROJECTION), mlp=expert_tensors.GATED_SHARED_MLP),
)
