"""The table of multimodal classes: each is a language model of another family beside towers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isthmus.families.family import Family
from isthmus.families.models import (
    deepseek_v3,
    gemma3_text,
    glm4v,
    glm4v_moe,
    gpt_oss,
    lfm2,
    lfm2_moe,
    llama,
    llama4_text,
    ministral3,
    mistral,
    qwen2,
    qwen2_vl,
    qwen3,
    qwen3_5_moe_text,
    qwen3_5_text,
    qwen3_moe,
    qwen3_vl,
    qwen3_vl_moe,
)
from isthmus.families.models.gemma4 import gemma4_text, gemma4_unified_text
from isthmus.families.models.step import step3p5
from isthmus.families.multimodal import LLAVA_MODULES, LLAVA_OTHER_NAMES, LLAVA_TOWERS, multimodal

_NATIVE: dict[str, Any] = {
    "names": {"model.": "model.language_model."},
    "module_names": {},
    "towers": ("model.vision_tower.*", "model.multi_modal_projector.*"),
    "other_names": {},
}
"""Names of classes whose published files have the names in the memory of transformers."""
_LLAVA_NEXT: dict[str, Any] = {
    "towers": (*LLAVA_TOWERS, "image_newline"),
    "other_names": LLAVA_OTHER_NAMES | {"model.image_newline": "image_newline"},
}
_QWEN = _NATIVE | {"tied": False, "towers": ("model.visual.*",)}
_QWEN_MTP = _QWEN | {"towers": ("model.visual.*", "mtp.*")}
"""transformers does not load the MTP layers, which are passed through."""
_GLM = _QWEN | {"tied": "either"}
_QWEN2_VL: dict[str, Any] = {
    "tied": "either",
    "names": {},
    "module_names": {"model.": "model.language_model."},
    "towers": ("visual.*",),
    "other_names": {"model.language_model.": "model.", "model.visual.": "visual."},
    "outside": ("vision_*", "image_*", "video_*", "architectures", "model_type", "transformers_version"),
}
"""Published files have the names and the config of the language model alone, with a section for the tower."""
_IDEFICS = _NATIVE | {
    "tied": False,
    "names": {"model.": "model.text_model."},
    "towers": ("model.vision_model.*", "model.connector.*"),
}

TABLE: Mapping[str, Family] = {
    "Gemma 3, the whole model: the text model behind a SigLIP vision tower.": multimodal(
        "gemma3", "Gemma3ForConditionalGeneration", gemma3_text.FAMILY, tied=True
    ),
    "Gemma 4, the whole model: the text model beside a vision tower and, in small models, an audio tower.": multimodal(
        "gemma4",
        "Gemma4ForConditionalGeneration",
        gemma4_text.FAMILY,
        tied=True,
        **_NATIVE
        | {
            "towers": tuple(
                f"model.{name}.*" for name in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
            )
        },
    ),
    "Gemma 4's unified models, whole: the text model with projections of image patches and of audio, without "
    "towers.": multimodal(
        "gemma4_unified",
        "Gemma4UnifiedForConditionalGeneration",
        gemma4_unified_text.FAMILY,
        tied=True,
        **_NATIVE | {"towers": ("model.vision_embedder.*", "model.embed_vision.*", "model.embed_audio.*")},
    ),
    "GLM-4.1V: GLM-4 beside a vision tower, with biases on query, key and value.": multimodal(
        "glm4v", "Glm4vForConditionalGeneration", glm4v.TEXT, aliases=("glm4v_text",), **_GLM
    ),
    "GLM-4.5V and 4.6V: GLM-4.5 beside a vision tower, without QK norms.": multimodal(
        "glm4v_moe", "Glm4vMoeForConditionalGeneration", glm4v_moe.TEXT, aliases=("glm4v_moe_text",), **_GLM
    ),
    "Idefics3: Llama 3 behind a SigLIP tower.": multimodal(
        "idefics3", "Idefics3ForConditionalGeneration", llama.FAMILY, **_IDEFICS
    ),
    "InternVL 3 and 3.5: Qwen2, Qwen3, Qwen3 with experts or gpt-oss behind an InternViT tower.": multimodal(
        "internvl",
        "InternVLForConditionalGeneration",
        qwen2.FAMILY,
        qwen3.FAMILY,
        qwen3_moe.FAMILY,
        gpt_oss.FAMILY,
        tied=True,
    ),
    "Kimi K2.5: a DeepSeek-V3 language model behind a vision tower.": multimodal(
        "kimi_k25",
        "Kimi_K25ForConditionalGeneration",
        deepseek_v3.FAMILY,
        towers=("vision_tower.*", "mm_projector.*", "model.mm_projector.*"),
        tied=True,
        module_names=LLAVA_MODULES,
        # transformers 5 renames the layers when it saves the model.
        other_names={"language_model.model.blocks.": "language_model.model.layers."},
        aliases=("kimi_k2",),
    ),
    "LFM2-VL: LFM2 behind a SigLIP 2 tower.": multimodal(
        "lfm2_vl",
        "Lfm2VlForConditionalGeneration",
        lfm2.FAMILY,
        lfm2_moe.FAMILY,
        tied=True,
        tied_names=("tie_embedding",),
        **_NATIVE,
    ),
    "Llama 4, the whole model: its language model beside a vision tower.": multimodal(
        "llama4",
        "Llama4ForConditionalGeneration",
        llama4_text.FAMILY,
        towers=("vision_model.*", "multi_modal_projector.*"),
        tied=None,
        module_names={},
        other_names={},
    ),
    "LLaVA 1.5 and Pixtral: Llama, Mistral or Qwen2 behind a vision tower.": multimodal(
        "llava", "LlavaForConditionalGeneration", llama.FAMILY, mistral.FAMILY, qwen2.FAMILY, tied="either"
    ),
    "LLaVA 1.6: Llama, Mistral or Qwen2 behind a vision tower.": multimodal(
        "llava_next",
        "LlavaNextForConditionalGeneration",
        llama.FAMILY,
        mistral.FAMILY,
        qwen2.FAMILY,
        tied=False,
        **_LLAVA_NEXT,
    ),
    "LLaVA-OneVision: Qwen2 or Qwen3 behind a SigLIP tower.": multimodal(
        "llava_onevision",
        "LlavaOnevisionForConditionalGeneration",
        qwen2.FAMILY,
        qwen3.FAMILY,
        tied="either",
        **_LLAVA_NEXT,
    ),
    "Mistral Small 3.1 and later, and Ministral 3: Mistral or Ministral 3 behind a Pixtral vision tower.": multimodal(
        "mistral3", "Mistral3ForConditionalGeneration", mistral.FAMILY, ministral3.FAMILY, tied=True
    ),
    "Qwen2-VL: Qwen2 beside a vision tower.": multimodal(
        "qwen2_vl", "Qwen2VLForConditionalGeneration", qwen2_vl.TEXT, aliases=("qwen2_vl_text",), **_QWEN2_VL
    ),
    "Qwen2.5-VL: Qwen2 beside a vision tower.": multimodal(
        "qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration", qwen2_vl.TEXT, aliases=("qwen2_5_vl_text",), **_QWEN2_VL
    ),
    "Qwen3.5, the whole model: its language model beside a vision tower.": multimodal(
        "qwen3_5", "Qwen3_5ForConditionalGeneration", qwen3_5_text.FAMILY, **_QWEN_MTP
    ),
    "Qwen3.5 with experts, the whole model: its language model beside a vision tower.": multimodal(
        "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", qwen3_5_moe_text.FAMILY, **_QWEN_MTP
    ),
    "Qwen3-VL: Qwen3 beside a vision tower.": multimodal(
        "qwen3_vl", "Qwen3VLForConditionalGeneration", qwen3_vl.TEXT, aliases=("qwen3_vl_text",), **_QWEN
    ),
    "Qwen3-VL with experts (30B-A3B, 235B-A22B): Qwen3's beside a vision tower, stacked in one tensor and "
    "transposed.": multimodal(
        "qwen3_vl_moe", "Qwen3VLMoeForConditionalGeneration", qwen3_vl_moe.TEXT, aliases=("qwen3_vl_moe_text",), **_QWEN
    ),
    "SmolVLM and SmolVLM2: Llama behind a SigLIP tower.": multimodal(
        "smolvlm", "SmolVLMForConditionalGeneration", llama.FAMILY, **_IDEFICS
    ),
    "Step 3.7: the language model of Step 3.5 behind a vision tower.": multimodal(
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
    ),
}
"""Families by what they are, in one line."""
