"""Errors before any check of the run."""

from __future__ import annotations

import pytest

import isthmus
from isthmus.config.schema import RunConfig
from isthmus.errors import DataError, UsageError
from isthmus.recipes import run

SFT = RunConfig.model_validate({"recipe": "sft", "out": "o", "model": {"path": "m"}, "data": {"files": ["chats.json"]}})


@pytest.mark.parametrize(("world_size", "closed"), [("1", True), ("2", False)])
def test_failed_rank_reports_before_it_closes_groups(
    monkeypatch: pytest.MonkeyPatch, world_size: str, closed: bool
) -> None:
    """Closing NCCL groups may wait for the other ranks."""

    def validate(*_: object, **__: object) -> None:
        raise DataError("bad.")

    closes: list[bool] = []
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setattr(run, "validate", validate)
    monkeypatch.setattr(run, "close_groups", lambda: closes.append(True))
    with pytest.raises(DataError):
        isthmus.sft(SFT)
    assert bool(closes) == closed


def test_config_of_another_recipe_is_an_error() -> None:
    for recipe in (isthmus.dpo, isthmus.pretrain):
        with pytest.raises(UsageError, match=r"Call isthmus\.sft"):
            recipe(SFT)
