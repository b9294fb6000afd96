"""Hunyuan dense: QK norms after the rotation, whose base a constant may stretch."""

from isthmus.families.family import Family, with_defaults
from isthmus.families.rules import decoder
from isthmus.families.rules.rule import renamed

FAMILY = Family(
    name="hunyuan_v1_dense",
    hf_architecture="HunYuanDenseV1ForCausalLM",
    keys=with_defaults(decoder.KEYS, max_position_embeddings=2048, rms_norm_eps=1e-5) | decoder.ATTENTION_BIAS,
    fixed=decoder.FIXED,
    traits={"qk_norm": True, "qk_norm_after_rotation": True},
    rope_defaults={"alpha": None},
    rules=renamed(decoder.RULES, {"q_norm": "query_layernorm", "k_norm": "key_layernorm"}),
)
