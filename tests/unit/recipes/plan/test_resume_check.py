from __future__ import annotations

import copy
from typing import Any

from isthmus.config.schema.resume_rules import RESUME_RULES
from isthmus.recipes.plan.resume_check import changes

MODEL = {"name": "m", "architecture": {"hidden_size": 64, "num_layers": 2}, "weights": "1"}
RECORD: dict[str, Any] = {
    "settings": {name: None for name in RESUME_RULES} | {"optim.lr": 1e-3, "optim.eps": 1e-8, "out": "a"},
    "model": MODEL, "teacher": MODEL, "adapter": None, "tokenizer": {"vocabulary": "v", "template": "t", "probe": "p"},
}  # fmt: skip


def found(**parts: Any) -> list[tuple[str, str]]:
    return [(change.text, change.rule) for change in changes(RECORD, copy.deepcopy(RECORD) | parts)]


def test_equal_records_and_settings_that_are_free() -> None:
    assert found() == []
    assert found(settings=RECORD["settings"] | {"out": "b", "model.path": "elsewhere", "parallel.tp": 2}) == []


def test_each_difference_has_a_line_and_the_rule_of_its_setting() -> None:
    settings = {"optim.lr": 2e-3, "train.steps": 9, "data.seed": 3}
    assert found(settings=RECORD["settings"] | settings) == [
        ("data.seed null -> 3", "fixed"), ("optim.lr 0.001 -> 0.002", "ask"), ("train.steps null -> 9", "noted"),
    ]  # fmt: skip
    larger = MODEL | {"architecture": {"hidden_size": 96, "num_layers": 2}, "weights": "2"}
    assert found(model=larger) == [("model hidden_size 64 -> 96", "fixed")]
    other = MODEL | {"name": "n", "weights": "2"}
    assert found(model=other) == [("model weights of m -> other weights in n", "fixed")]
    drawn = MODEL | {"weights": "random"}
    assert found(model=drawn) == [("model weights of m -> random", "fixed")]
    assert found(teacher=other) == [("distill.teacher weights of m -> other weights in n", "ask")]
    assert found(adapter="x") == [("lora.path: another adapter to start from", "fixed")]
    for part, text in (("vocabulary", "tokenizer: other tokens"), ("probe", "tokenizer: other tokens")):
        assert found(tokenizer=RECORD["tokenizer"] | {part: "x"}) == [(text, "fixed")]
    template = RECORD["tokenizer"] | {"template": "x"}
    assert found(tokenizer=template) == [("chat.template: another chat template", "fixed")]


def test_a_setting_that_an_older_version_did_not_have_has_its_default() -> None:
    saved = copy.deepcopy(RECORD)
    del saved["settings"]["optim.eps"]
    assert [*changes(saved, RECORD)] == []
    now = RECORD | {"settings": RECORD["settings"] | {"optim.eps": 1e-6}}
    assert [change.text for change in changes(saved, now)] == ["optim.eps 1e-08 -> 1e-06"]
