"""What tests need to know about a family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 12,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "head_dim": 8,
    "v_head_dim": 6,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
"""Sizes of latent attention with experts (DeepSeek)."""


@dataclass(frozen=True, kw_only=True)
class TinyFamily:
    sizes: dict[str, Any] = field(default_factory=dict)
    """Beside those of :data:`ranks.tiny.SIZES`."""
    around: dict[str, Any] | None = None
    """Of a multimodal model: its config beside the section of the language model, which has all other settings."""
    logits: dict[str, tuple[dict[str, Any], dict[str, Any] | None]]
    """Settings of the cases of tests/parity/test_logits.py, and settings that turn the tested feature off."""
    layouts: tuple[dict[str, Any], ...] = ({"tp": 2},)
    """Of two ranks, in which weights are imported and exported, and three steps equal those of transformers."""
    training: dict[str, Any] = field(default_factory=dict)
    """Settings of the model that is trained."""
