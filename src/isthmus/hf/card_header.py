"""Model cards: README.md with a YAML header that the Hub reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

FILE = "README.md"
_INHERITED_KEYS = ("license", "license_name", "license_link", "language")


def inherited_metadata(folder: Path) -> dict[str, Any]:
    """Licence and languages in the card of a base model; empty without a readable card."""
    try:
        data = ModelCard((folder / FILE).read_text(encoding="utf-8")).data.to_dict()
    except Exception:  # the YAML library raises its own errors
        return {}
    return {key: data[key] for key in _INHERITED_KEYS if data.get(key)}


def render_card(metadata: Mapping[str, Any], body: str) -> str:
    return f"---\n{ModelCardData(**metadata).to_yaml()}\n---\n\n{body}"
