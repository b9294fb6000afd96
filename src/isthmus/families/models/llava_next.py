"""LLaVA 1.6: Llama, Mistral or Qwen2 behind a vision tower."""

from isthmus.families.models import llama, mistral, qwen2
from isthmus.families.multimodal import LLAVA_NEXT, multimodal

FAMILY = multimodal(
    "llava_next",
    "LlavaNextForConditionalGeneration",
    llama.FAMILY,
    mistral.FAMILY,
    qwen2.FAMILY,
    tied=False,
    **LLAVA_NEXT,
)
