"""The language model of Qwen2-VL and Qwen2.5-VL: Qwen2 with positions in three sections."""

from dataclasses import replace

from isthmus.families.models import qwen2
from isthmus.families.rules import decoder

TEXT = replace(
    qwen2.FAMILY,
    keys={
        **qwen2.FAMILY.keys,
        "num_query_groups": decoder.kv_heads(default=8),
        "norm_epsilon": decoder.number("rms_norm_eps", 1e-5),
    },
    sliding_window_pattern=80,
    rope_defaults={"rope_theta": 1000000.0, "mrope_section": None},
)
