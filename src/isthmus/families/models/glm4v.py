"""The language model of GLM-4.1V: GLM-4 with biases on query, key and value."""

from dataclasses import replace

from isthmus.families.family import with_defaults, without
from isthmus.families.models import glm4
from isthmus.families.rules import decoder

TEXT = replace(
    glm4.FAMILY,
    keys=with_defaults(
        without(glm4.FAMILY.keys, "qkv_bias", "kv_channels"), max_position_embeddings=32768, rms_norm_eps=1e-5
    )
    | {"kv_channels": decoder.KEYS["kv_channels"]},
    traits={**glm4.FAMILY.traits, "qkv_bias": True},
    rope_defaults={"partial_rotary_factor": 1.0, "mrope_section": None},
)
