"""Mistral Small 3.1 and later: Mistral behind a Pixtral vision tower."""

from isthmus.families.models import mistral
from isthmus.families.rules.multimodal import multimodal

FAMILY = multimodal("mistral3", "Mistral3ForConditionalGeneration", mistral.FAMILY, tied=True)
