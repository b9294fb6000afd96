"""Step 3.7: the language model of Step 3.5 behind a vision tower."""

from dataclasses import replace

from isthmus.families.models import step3p5
from isthmus.families.multimodal import multimodal

FAMILY = multimodal(
    "step3p7",
    "Step3p7ForConditionalGeneration",
    replace(step3p5.FAMILY, own_code=False, unadapted=()),
    tied=False,
    names={},
    module_names={
        "model.": "model.language_model.",
        ".moe.gate_proj": ".mlp.experts.gate_up_proj",
        ".moe.up_proj": ".mlp.experts.gate_up_proj",
        ".moe.down_proj": ".mlp.experts.down_proj",
        ".share_expert.": ".mlp.shared_experts.",
    },
    towers=("vision_model.*", "vit_large_projector.*"),
    other_names={},
)
