"""What tests need to know about a family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
