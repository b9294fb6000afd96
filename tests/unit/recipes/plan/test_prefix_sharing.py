"""When answers to the same prompt share its computation, and why not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.config.load import load_config
from isthmus.errors import UsageError
from isthmus.families.architecture import Dropout
from isthmus.recipes.plan.prefix_sharing import shares_prefixes


def shares(recipe: Any, device_type: str = "cpu", *, rope: str = "", dropout: float = 0.0, **settings: Any) -> bool:
    rewards = {"rollout.reward": "exact_match"} if recipe == "grpo" else {}
    flags = {"model": "m", "data": ["d"], "out": "o", **rewards} | settings
    scaling = SimpleNamespace(kind=rope) if rope else None
    architecture = SimpleNamespace(
        moe=None, rotary_kinds=[SimpleNamespace(rotary=SimpleNamespace(rope_scaling=scaling))]
    )
    plan: Any = SimpleNamespace(architecture=architecture, dropout=Dropout(hidden=dropout))
    return shares_prefixes(load_config(recipe, None, flags=flags), plan, device_type)


@pytest.mark.parametrize("recipe", ["dpo", "reward", "grpo"])
def test_auto(recipe: str) -> None:
    assert shares(recipe)
    assert not shares(recipe, "cuda") and shares(recipe, "cuda", **{"train.share_prefixes": True})
    assert not shares(recipe, **{"train.share_prefixes": False})
    assert not shares(recipe, rope="dynamic") and shares(recipe, rope="llama3")


@pytest.mark.parametrize(
    ("recipe", "given", "reason"),
    [
        ("sft", {}, "samples of sft do not repeat prompts"),
        ("dpo", {"parallel.cp": 2}, "context parallelism"),
        ("dpo", {"dropout": 0.1}, "dropout"),
        ("dpo", {"train.neftune_alpha": 5.0}, "noise"),
        ("dpo", {"lora.rank": 4, "lora.dropout": 0.1}, "dropout"),
        ("grpo", {"moe.aux_loss": 0.01}, "losses of the router"),
        ("reward", {"rope": "longrope"}, "length of the sample"),
    ],
)
def test_what_cannot_share(recipe: str, given: dict[str, Any], reason: str) -> None:
    assert not shares(recipe, **given)
    with pytest.raises(UsageError, match=rf"train\.share_prefixes=true: .*{reason}.*Leave it out"):
        shares(recipe, **given, **{"train.share_prefixes": True})
