"""MiniMax-M2: sigmoid routing with an expert bias, QK norms over the whole projection, partial rotary embedding."""

from isthmus.families.family import Family, Fixed, Key, with_defaults
from isthmus.families.models import mixtral
from isthmus.families.rules import decoder, expert_tensors
from isthmus.families.rules.rule import renamed

FAMILY = Family(
    name="minimax_m2",
    hf_architecture="MiniMaxM2ForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=196608)
    | {
        "num_query_groups": Key("num_key_value_heads", default=8),
        "kv_channels": Key("head_dim", default=128),
        "moe.ffn_hidden_size": Key("intermediate_size"),
        "moe.num_experts": Key("num_local_experts", default=256, aliases=("num_experts",)),
        "moe.top_k": Key("num_experts_per_tok", default=8),
    },
    fixed=decoder.FIXED
    | {"router_jitter_noise": Fixed((0.0,), "training runs without noise; set it to 0", training=True)},
    traits={
        "qk_norm": True,
        "qk_norm_over": "projection",
        "moe.score": "sigmoid",
        "moe.expert_bias": True,
        "moe.normalize": True,
    },
    rope_defaults={"rope_theta": 5000000.0, "partial_rotary_factor": 1.0, "rotary_dim": None},
    module_names=mixtral.FAMILY.module_names,
    rules=decoder.pre_norm_rules(
        mlp=renamed(
            (*expert_tensors.ROUTER, *expert_tensors.EXPERT_BIAS, *expert_tensors.EXPERTS),
            {".mlp.gate.e_score": ".mlp.e_score", **mixtral.NAMES},
        )
    ),
)
