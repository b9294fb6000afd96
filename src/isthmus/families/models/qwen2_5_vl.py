"""Qwen2.5-VL: Qwen2 beside a vision tower."""

from isthmus.families.models import qwen2_vl
from isthmus.families.multimodal import QWEN2_VL, multimodal

FAMILY = multimodal(
    "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", qwen2_vl.TEXT, aliases=("qwen2_5_vl_text",), **QWEN2_VL
)
