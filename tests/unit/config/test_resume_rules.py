from __future__ import annotations

import pytest

from isthmus.config.schema.resume_rules import _TABLE as TABLE
from isthmus.config.schema.resume_rules import RESUME_RULES, names_accepted
from isthmus.config.setting_errors import dotted, settings


def test_each_setting_has_one_rule() -> None:
    """A new setting needs a rule in ``resume_rules``: what is to happen if a resumed run has another value?"""
    table_names = [name for names in TABLE.values() for name in names.split()]
    assert sorted(table_names) == sorted(map(dotted, settings()))
    assert len(RESUME_RULES) == len(table_names) > 100


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("train.steps", "train.steps may change without it"),
        ("every", "every may change without it"),
        ("global_batch_size", "a checkpoint fits one train.global_batch_size only"),
        ("optim.optimizer", "a checkpoint fits one optim.optimizer only"),
        ("min_lrr", "did you mean min_lr"),
    ],
)
def test_what_cannot_be_accepted(name: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        names_accepted(["lr", name])


def test_names_are_dotted_or_last_names() -> None:
    assert names_accepted(["lr", "optim.min_lr", "beta"]) == [
        "optim.lr",
        "optim.min_lr",
        "dpo.beta",
        "distill.beta",
        "kto.beta",
    ]
    assert names_accepted(["distill.teacher"]) == ["distill.teacher"]
