"""Gemma 4's unified models, whole: the text model with projections of image patches and of audio, without towers."""

from isthmus.families.models import gemma4_unified_text
from isthmus.families.multimodal import multimodal

FAMILY = multimodal(
    "gemma4_unified",
    "Gemma4UnifiedForConditionalGeneration",
    gemma4_unified_text.FAMILY,
    tied=True,
    names={"model.": "model.language_model."},
    module_names={},
    towers=("model.vision_embedder.*", "model.embed_vision.*", "model.embed_audio.*"),
    other_names={},
)
