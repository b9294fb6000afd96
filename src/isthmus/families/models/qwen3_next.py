"""Qwen3-Next: gated delta nets, every fourth layer gated attention; many small experts and a gated shared one."""

from isthmus.families.family import Family, Fixed, Key
from isthmus.families.rules import decoder, delta_net, expert_tensors
from isthmus.families.rules.decoder import flag
from isthmus.families.rules.rule import in_layers, renamed

_PROJECTION = delta_net.in_proj(
    *(("in_proj_qkvz", rows) for rows in ("Lk", "Lk", "Lv", "Lv")),
    *(("in_proj_ba", "Ln"),) * 2,
    hf_strands="Lm",
)

FAMILY = Family(
    name="qwen3_next",
    hf_architecture="Qwen3NextForCausalLM",
    keys=decoder.KEYS
    | decoder.ATTENTION_BIAS
    | delta_net.KEYS
    | {
        "num_query_groups": decoder.kv_heads(default=2),
        "kv_channels": Key("head_dim", default=256),
        "max_position_embeddings": Key("max_position_embeddings", default=32768),
        "moe.num_experts": Key("num_experts", default=512, aliases=("num_local_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=10),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=512),
        "moe.shared_ffn_hidden_size": Key("shared_expert_intermediate_size", default=512),
        "moe.normalize": flag("norm_topk_prob", default=True),
    },
    fixed=decoder.FIXED | {"attn_output_gate": Fixed((True,), "attention of this family has a gate")},
    traits={"qk_norm": True, "norm_zero_centered": True, "attention_gate": True, "moe.shared_gate": True},
    derived={"moe.dense_layers": expert_tensors.SPARSE_STEP, "mixers": delta_net.mixers("gated_delta_net")},
    rope_defaults={"partial_rotary_factor": 0.25},
    rules=decoder.pre_norm_rules(
        attention=(
            *in_layers("attention", *decoder.GATED_ATTENTION),
            *delta_net.mixer_rules(_PROJECTION, norm="norm", out="out_proj", time_step="plain_ones"),
        ),
        mlp=(
            *expert_tensors.DENSE,
            *expert_tensors.ROUTER,
            *expert_tensors.EXPERTS,
            *renamed(expert_tensors.SHARED_EXPERTS, {"shared_experts": "shared_expert"}),
            expert_tensors.SHARED_GATE,
        ),
    ),
)
