"""Idefics3: Llama 3 behind a SigLIP tower."""

from isthmus.families.models import llama
from isthmus.families.multimodal import IDEFICS, multimodal

FAMILY = multimodal("idefics3", "Idefics3ForConditionalGeneration", llama.FAMILY, **IDEFICS)
