"""Hunyuan dense: QK norms after the rotation, whose base a constant may stretch."""

from isthmus.families.family import Family, Key
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import number
from isthmus.families.rules.rule import renamed

FAMILY = Family(
    name="hunyuan_v1_dense",
    hf_architecture="HunYuanDenseV1ForCausalLM",
    keys=decoder.KEYS
    | decoder.ATTENTION_BIAS
    | {
        "max_position_embeddings": Key("max_position_embeddings", default=2048),
        "norm_epsilon": number("rms_norm_eps", 1e-5),
    },
    fixed=decoder.FIXED,
    traits={"qk_norm": True, "qk_norm_after_rotation": True},
    rope_defaults={"alpha": None},
    rules=renamed(decoder.RULES, {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}),
)
