"""Sweeps over all families, presets or values, of which a tier of the tests runs a case of each kind.

`make unit` leaves out the others that are marked ``sweep``, `make test` those that are marked ``thorough``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

BLOCK_FAMILIES = (
    "deepseek_v3", "falcon_mamba", "glm_moe_dsa", "gpt2", "gpt_oss", "kimi_linear", "lfm2", "nemotron_h", "qwen3",
    "qwen3_next", "qwen3_vl",
)  # fmt: skip
"""Together they have every kind of block (tests/unit/families/test_block_families.py); one is multimodal."""


SETTING_FAMILIES = (
    *BLOCK_FAMILIES, "apertus", "bailing_hybrid", "bamba", "codegen", "cohere2", "cohere2_moe", "deepseek_v2",
    "ernie4_5_moe", "exaone4", "falcon", "falcon_h1", "flex_olmo", "gemma2", "gemma4", "gemma4_text", "gpt_neox",
    "granite", "granitemoehybrid", "isthmus", "jamba", "lfm2_moe", "llama4", "mimo_v2_flash", "ministral3",
    "nanochat", "olmo", "olmo_hybrid", "opt", "phimoe", "stablelm", "step3p5",
)  # fmt: skip
"""Together they have every kind of setting and of tensor rule (tests/parity/test_sweeps.py)."""


def swept(
    values: Iterable[Any], always: Iterable[Any] = BLOCK_FAMILIES, *, further: pytest.MarkDecorator = pytest.mark.sweep
) -> list[Any]:
    """The values as cases of ``parametrize``; those not in ``always`` are marked with ``further``."""
    return [value if value in always else pytest.param(value, marks=further, id=str(value)) for value in values]


def thorough_but(values: Iterable[Any], always: Iterable[Any] = SETTING_FAMILIES) -> list[Any]:
    """The values as cases of ``parametrize``; those not in ``always`` are ``thorough``."""
    return swept(values, always, further=pytest.mark.thorough)


def by_tier(families: Iterable[str]) -> list[Any]:
    """The families as cases: a family of each kind of block, of each kind of setting in the sweep, others thorough."""
    return [
        family
        if family in BLOCK_FAMILIES
        else pytest.param(
            family, marks=pytest.mark.sweep if family in SETTING_FAMILIES else pytest.mark.thorough, id=family
        )
        for family in families
    ]
