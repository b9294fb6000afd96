"""InternVL 3 and 3.5: Qwen2, Qwen3, Qwen3 with experts or gpt-oss behind an InternViT tower."""

from isthmus.families.models import gpt_oss, qwen2, qwen3, qwen3_moe
from isthmus.families.multimodal import multimodal

FAMILY = multimodal(
    "internvl",
    "InternVLForConditionalGeneration",
    qwen2.FAMILY,
    qwen3.FAMILY,
    qwen3_moe.FAMILY,
    gpt_oss.FAMILY,
    tied=True,
)
