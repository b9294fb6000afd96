"""Decoders with experts."""

from __future__ import annotations

from ranks.tiny_families.tiny_family import TinyFamily

FAMILIES: dict[str, TinyFamily] = {}
