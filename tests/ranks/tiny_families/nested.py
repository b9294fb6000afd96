"""Language models of multimodal configs."""

from __future__ import annotations

from typing import Any

from ranks.tiny_families.tiny_family import TinyFamily

_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

FAMILIES: dict[str, TinyFamily] = {
    "gemma3": TinyFamily(
        sizes={"sliding_window": 5, "sliding_window_pattern": 2},
        around={"vision_config": _VISION, "mm_tokens_per_image": 4},
        logits={"gemma3": ({}, {"sliding_window": 50}), "gemma3-untied": ({"tie_word_embeddings": False}, None)},
    ),
    "mistral3": TinyFamily(
        around={"vision_config": _VISION | {"head_dim": 8}},
        logits={"mistral3": ({"sliding_window": 5}, {"sliding_window": None})},
        training={"tie_word_embeddings": False},
    ),
}
