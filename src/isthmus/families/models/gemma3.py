"""Gemma 3, the whole model: the text model behind a SigLIP vision tower."""

from isthmus.families.models import gemma3_text
from isthmus.families.multimodal import multimodal

FAMILY = multimodal("gemma3", "Gemma3ForConditionalGeneration", gemma3_text.FAMILY, tied=True)
