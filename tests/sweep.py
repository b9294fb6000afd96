"""Sweeps over all families, presets or values: `make unit` runs a case of each kind, `make test` runs all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

BLOCK_FAMILIES = (
    "deepseek_v3", "falcon_mamba", "glm_moe_dsa", "gpt2", "gpt_oss", "kimi_linear", "lfm2", "nemotron_h", "qwen3",
    "qwen3_next", "qwen3_vl",
)  # fmt: skip
"""Together they have every kind of block (tests/unit/families/test_block_families.py); one is multimodal."""


def swept(values: Iterable[Any], always: Iterable[Any] = BLOCK_FAMILIES) -> list[Any]:
    """The values as cases of ``parametrize``; those not in ``always`` are marked ``sweep``."""
    return [
        value if value in always else pytest.param(value, marks=pytest.mark.sweep, id=str(value)) for value in values
    ]
