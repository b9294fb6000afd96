"""The language model of Qwen2-VL and Qwen2.5-VL: Qwen2 with positions in three sections."""

from dataclasses import replace

from isthmus.families.family import with_defaults
from isthmus.families.models import qwen2

TEXT = replace(
    qwen2.FAMILY,
    keys=with_defaults(qwen2.FAMILY.keys, num_key_value_heads=8, rms_norm_eps=1e-5),
    sliding_window_pattern=80,
    rope_defaults={"rope_theta": 1000000.0, "mrope_section": None},
)
