"""Qwen3.5, the whole model: its language model beside a vision tower."""

from isthmus.families.models import qwen3_5_text
from isthmus.families.multimodal import QWEN, multimodal

FAMILY = multimodal("qwen3_5", "Qwen3_5ForConditionalGeneration", qwen3_5_text.FAMILY, **QWEN)
