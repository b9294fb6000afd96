"""Kimi K2.5: a DeepSeek-V3 language model behind a vision tower."""

from isthmus.families.models import deepseek_v3
from isthmus.families.multimodal import LLAVA_MODULES, multimodal

FAMILY = multimodal(
    "kimi_k25",
    "Kimi_K25ForConditionalGeneration",
    deepseek_v3.FAMILY,
    towers=("vision_tower.*", "mm_projector.*", "model.mm_projector.*"),
    tied=True,
    module_names=LLAVA_MODULES,
    # transformers 5 renames the layers when it saves the model.
    other_names={"language_model.model.blocks.": "language_model.model.layers."},
    aliases=("kimi_k2",),
)
