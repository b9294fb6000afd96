"""Sweeps over all families or presets: `make unit` runs a case for each kind of block, `make test` runs all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

BLOCK_FAMILIES = (
    "deepseek_v3", "falcon_mamba", "glm_moe_dsa", "gpt2", "gpt_oss", "kimi_linear", "lfm2", "nemotron_h", "qwen3",
    "qwen3_next", "qwen3_vl",
)  # fmt: skip
"""Together they have every kind of block (tests/unit/families/test_block_families.py); one is multimodal."""


def swept(names: Iterable[str], always: Iterable[str] = BLOCK_FAMILIES) -> list[Any]:
    """The names as cases of ``parametrize``; those not in ``always`` are marked ``sweep``."""
    return [name if name in always else pytest.param(name, marks=pytest.mark.sweep, id=name) for name in names]
