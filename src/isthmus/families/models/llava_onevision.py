"""LLaVA-OneVision: Qwen2 or Qwen3 behind a SigLIP tower."""

from isthmus.families.models import qwen2, qwen3
from isthmus.families.multimodal import LLAVA_NEXT, multimodal

FAMILY = multimodal(
    "llava_onevision",
    "LlavaOnevisionForConditionalGeneration",
    qwen2.FAMILY,
    qwen3.FAMILY,
    tied="either",
    **LLAVA_NEXT,
)
