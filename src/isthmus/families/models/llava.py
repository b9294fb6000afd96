"""LLaVA 1.5 and Pixtral: Llama, Mistral or Qwen2 behind a vision tower."""

from isthmus.families.models import llama, mistral, qwen2
from isthmus.families.multimodal import multimodal

FAMILY = multimodal("llava", "LlavaForConditionalGeneration", llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, tied="either")
