"""LFM2-VL: LFM2 behind a SigLIP 2 tower."""

from isthmus.families.models import lfm2, lfm2_moe
from isthmus.families.multimodal import NATIVE, multimodal

FAMILY = multimodal(
    "lfm2_vl",
    "Lfm2VlForConditionalGeneration",
    lfm2.FAMILY,
    lfm2_moe.FAMILY,
    tied_names=("tie_embedding",),
    **NATIVE,
)
