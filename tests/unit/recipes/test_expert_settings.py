"""Settings of experts are refused where a model or a layout has no place for them."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus.config.schema import MoeConfig, ParallelConfig
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.registry import all_families
from isthmus.recipes.setup.layout_checks import check_experts, check_layout
from ranks.tiny import OWN_SIZES, SIZES


def architecture(family: str) -> Architecture:
    from transformers import AutoConfig

    config = AutoConfig.for_model(family, **{**SIZES, **OWN_SIZES.get(family, {})})
    return all_families()[family].to_architecture(config.to_dict())


@pytest.mark.parametrize(
    ("family", "moe", "why"),
    [
        ("qwen3", {"aux_loss": 0.1}, "moe.aux_loss is for MoE models"),
        ("qwen3_moe", {"expert_bias_update_rate": 0.1}, "moe.expert_bias_update_rate=0.1 .* qwen3_moe has none"),
        ("deepseek_v3", {"expert_bias_update_rate": 0.1, "capacity_factor": 1.5}, None),
        ("qwen3", {}, None),
    ],
)
def test_settings_need_experts(family: str, moe: dict[str, Any], why: str | None) -> None:
    if why is None:
        return check_experts(architecture(family), MoeConfig(**moe))
    with pytest.raises(UsageError, match=why):
        check_experts(architecture(family), MoeConfig(**moe))


@pytest.mark.parametrize(
    ("sizes", "why"),
    [
        ({"tp": 2, "ep": 2, "etp": 1, "sp": False}, "parallel.sp=true"),
        ({"tp": 2, "sp": True, "ep": 2, "etp": 1}, None),
        ({"ep": 4}, "ep=4 does not divide num_experts=6"),
        ({"etp": 2}, None),
    ],
)
def test_layouts_of_experts(sizes: dict[str, Any], why: str | None) -> None:
    if why is None:
        return check_layout(architecture("qwen3_moe"), ParallelConfig(**sizes))
    with pytest.raises(UsageError, match=why):
        check_layout(architecture("qwen3_moe"), ParallelConfig(**sizes))
