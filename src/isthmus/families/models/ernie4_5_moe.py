"""ERNIE 4.5 with experts: float32 softmax routing with an expert bias, interleaved rotary embedding."""

from dataclasses import replace

from isthmus.families.family import Family, Fixed, Key, with_defaults
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.decoder import number
from isthmus.families.rules.rule import renamed

FAMILY = Family(
    name="ernie4_5_moe",
    hf_architecture="Ernie4_5_MoeForCausalLM",
    keys=with_defaults(
        decoder.KEYS, num_key_value_heads=4, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True
    )
    | {
        "moe.num_experts": Key("moe_num_experts", default=64, aliases=("num_experts",)),
        "moe.top_k": Key("moe_k", default=6, aliases=("num_experts_per_tok",)),
        "moe.ffn_hidden_size": Key("moe_intermediate_size", default=1536),
        "moe.shared_ffn_hidden_size": expert_tensors.shared_width("moe_num_shared_experts", default=2),
        "moe.normalize_min": number("moe_norm_min", 1e-12),
    },
    fixed=decoder.FIXED | {"use_bias": Fixed((False,), "biases of linear layers are not supported")},
    traits={"rotary_interleaved": True, "moe.normalize": True, "moe.expert_bias": True, "moe.router_float32": True},
    derived={"moe.dense_layers": expert_tensors.INTERVAL},
    rope_defaults={"rope_theta": 500000.0},
    passed_through=("model.mtp_*",),
    rules=decoder.pre_norm_rules(
        mlp=(
            *expert_tensors.DENSE,
            replace(expert_tensors.ROUTER[0], dtype="float32"),
            *(
                replace(rule, when=None, stacked=True)
                for rule in renamed(expert_tensors.EXPERT_BIAS, {"mlp.gate.": "mlp.moe_statics."})
            ),
            *expert_tensors.EXPERTS,
            *expert_tensors.SHARED_EXPERTS,
        )
    ),
)
