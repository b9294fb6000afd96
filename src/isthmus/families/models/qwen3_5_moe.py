"""Qwen3.5 with experts, the whole model: its language model beside a vision tower."""

from isthmus.families.models import qwen3_5_moe_text
from isthmus.families.multimodal import QWEN, multimodal

FAMILY = multimodal("qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", qwen3_5_moe_text.FAMILY, **QWEN)
