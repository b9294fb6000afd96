"""The language model of Qwen3-VL: Qwen3 with positions in three sections."""

from dataclasses import replace

from isthmus.families.family import with_defaults
from isthmus.families.models import qwen3

TEXT = replace(
    qwen3.FAMILY,
    keys=with_defaults(qwen3.FAMILY.keys, max_position_embeddings=128000),
    sliding_window="never",
    rope_defaults={"rope_theta": 500000.0, "mrope_section": None},
)
