"""What a finished run suggests to type next."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.config.schema import RunConfig
from isthmus.recipes.run_result import RunResult


@pytest.mark.parametrize(
    ("recipe", "values", "expected"),
    [
        ("sft", {"model": "a b/hf"}, ["chat 'a b'", "report 'a b'", "eval 'a b' --tasks hellaswag"]),
        ("reward", {"model": "a b/hf"}, ["report 'a b'"]),
        ("dpo", {"adapter": "a b/adapter"}, ["report 'a b'", "merge org/m 'a b/adapter' 'a b-merged'"]),
        ("pretrain", {}, ["report 'a b'"]),
    ],
)
def test_next_commands(recipe: str, values: dict[str, Any], expected: list[str]) -> None:
    sections = {"recipe": recipe, "out": "a b", "model": {"path": "org/m"}, "data": {"files": [str(Path("f"))]}}
    fields = dict.fromkeys(RunResult.__slots__) | {"out": "a b", "steps": 1, "memory_gib": 1.0} | values
    commands = RunResult(**fields).next_commands(RunConfig.model_validate(sections))
    assert commands == [f"isthmus {command}" for command in expected]
