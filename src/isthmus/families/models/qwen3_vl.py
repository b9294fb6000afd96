"""Qwen3-VL: Qwen3 beside a vision tower."""

from dataclasses import replace

from isthmus.families.family import Key
from isthmus.families.models import qwen3
from isthmus.families.multimodal import QWEN_VL, multimodal

TEXT = replace(
    qwen3.FAMILY,
    keys={**qwen3.FAMILY.keys, "max_position_embeddings": Key("max_position_embeddings", default=128000)},
    sliding_window="never",
    rope_defaults={"rope_theta": 500000.0, "mrope_section": None},
)
FAMILY = multimodal("qwen3_vl", "Qwen3VLForConditionalGeneration", TEXT, aliases=("qwen3_vl_text",), **QWEN_VL)
