"""Errors before any check of the run."""

from __future__ import annotations

import pytest

import isthmus
from isthmus.config.schema import RunConfig
from isthmus.errors import UsageError


def test_config_of_another_recipe_is_refused() -> None:
    """Its data would be read in one way and learned in another."""
    config = RunConfig.model_validate(
        {"recipe": "sft", "out": "o", "model": {"path": "m"}, "data": {"files": ["chats.json"]}}
    )
    for run in (isthmus.dpo, isthmus.pretrain):
        with pytest.raises(UsageError, match=r"Call isthmus\.sft"):
            run(config)
