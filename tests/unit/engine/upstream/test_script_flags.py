"""Arguments of Megatron-LM that need what is missing."""

from __future__ import annotations

import enum
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus.engine.upstream.script_flags import APEX, GPU, REFUSED, REPLACED, TE, adapt, missing
from isthmus.errors import UsageError

Backend = enum.Enum("Backend", ["flash", "unfused", "auto"])


def test_replaced(capsys: pytest.CaptureFixture[str]) -> None:
    flags = {rule.name: rule.needing[0] for rule in REPLACED} | {"attention_backend": Backend.flash, "lr": 1.0}
    args, said = SimpleNamespace(**flags), list[str]()
    adapt(args, missing("cpu"), said.append)
    expected: dict[str, Any] = {rule.name: rule.value for rule in REPLACED}
    assert vars(args) == expected | {"attention_backend": Backend.unfused, "lr": 1.0}
    assert len(said) == len(REPLACED)
    assert "arguments: --distributed-backend gloo (a GPU is missing)" in said
    adapt(args, missing("cpu"), pytest.fail)


def test_nothing_is_replaced_if_nothing_is_missing() -> None:
    flags = {rule.name: rule.needing[0] for rule in REPLACED} | {"fp8": "hybrid", "context_parallel_size": 2}
    args = SimpleNamespace(**flags)
    adapt(args, set(), pytest.fail)
    assert vars(args) == flags


def test_missing_depends_on_the_platform() -> None:
    """The tested environment has neither extension."""
    assert GPU in missing("cpu") and GPU not in missing("rocm")
    assert {TE, APEX} <= missing("rocm")


@pytest.mark.parametrize("rule", REFUSED, ids=lambda rule: rule.name)
def test_refused(rule: Any) -> None:
    value = 2 if rule.allowed == (1,) else "flex" if isinstance(rule.allowed[0], str) else True
    with pytest.raises(UsageError, match=f"{rule.flag}.* needs {rule.needs}, which is missing"):
        adapt(SimpleNamespace(**{rule.name: value}), missing("cpu"), pytest.fail)
    adapt(SimpleNamespace(**{rule.name: rule.allowed[0]}), missing("cpu"), pytest.fail)
