"""Mistral Small 3.1 and later, and Ministral 3: Mistral or Ministral 3 behind a Pixtral vision tower."""

from isthmus.families.models import ministral3, mistral
from isthmus.families.multimodal import multimodal

FAMILY = multimodal("mistral3", "Mistral3ForConditionalGeneration", mistral.FAMILY, ministral3.FAMILY, tied=True)
