"""Gemma 4, the whole model: the text model beside a vision tower and, in small models, an audio tower."""

from isthmus.families.models import gemma4_text
from isthmus.families.multimodal import multimodal

FAMILY = multimodal(
    "gemma4",
    "Gemma4ForConditionalGeneration",
    gemma4_text.FAMILY,
    tied=True,
    names={"model.": "model.language_model."},
    module_names={},
    towers=("model.vision_tower.*", "model.embed_vision.*", "model.audio_tower.*", "model.embed_audio.*"),
    other_names={},
)
