"""SmolVLM and SmolVLM2: Llama behind a SigLIP tower."""

from isthmus.families.models import llama
from isthmus.families.multimodal import IDEFICS, multimodal

FAMILY = multimodal("smolvlm", "SmolVLMForConditionalGeneration", llama.FAMILY, **IDEFICS)
