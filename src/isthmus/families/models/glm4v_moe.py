"""The language model of GLM-4.5V and 4.6V: GLM-4.5 without QK norms."""

from dataclasses import replace

from isthmus.families.family import Fixed, with_defaults, without
from isthmus.families.models import glm4_moe
from isthmus.families.rules import mtp
from isthmus.families.rules.decoder import flag

TEXT = replace(
    glm4_moe.FAMILY,
    keys=with_defaults(without(glm4_moe.FAMILY.keys, "qk_norm"), max_position_embeddings=65536)
    | {"qkv_bias": flag("attention_bias", default=True), "mtp_layers": replace(mtp.KEY, default=0)},
    fixed={**glm4_moe.FAMILY.fixed, "use_qk_norm": Fixed((False,), "the class has no QK norms")},
    rope_defaults={"partial_rotary_factor": 0.5, "mrope_section": None},
)
