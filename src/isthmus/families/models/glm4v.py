"""The language model of GLM-4.1V: GLM-4 with biases on query, key and value."""

from dataclasses import replace

from isthmus.families.family import Key
from isthmus.families.models import glm4
from isthmus.families.rules import decoder
from isthmus.families.rules.decoder import number

TEXT = replace(
    glm4.FAMILY,
    keys={name: key for name, key in glm4.FAMILY.keys.items() if name not in ("qkv_bias", "kv_channels")}
    | {
        "kv_channels": decoder.KEYS["kv_channels"],
        "max_position_embeddings": Key("max_position_embeddings", default=32768),
        "norm_epsilon": number("rms_norm_eps", 1e-5),
    },
    traits={**glm4.FAMILY.traits, "qkv_bias": True},
    rope_defaults={"partial_rotary_factor": 1.0, "mrope_section": None},
)
