"""Llama 4, the whole model: its language model beside a vision tower."""

from isthmus.families.models import llama4_text
from isthmus.families.multimodal import LLAVA_NAMES, multimodal

FAMILY = multimodal(
    "llama4",
    "Llama4ForConditionalGeneration",
    llama4_text.FAMILY,
    towers=("vision_model.*", "multi_modal_projector.*"),
    tied=None,
    names=LLAVA_NAMES,
    module_names={},
    other_names={},
)
