"""Requirements on every setting of the schema."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any, get_origin

import pytest

from isthmus.config.load import load_config
from isthmus.config.schema import RunConfig, Section
from isthmus.config.setting_errors import GIVEN_BY, other_names, settings, trainers
from isthmus.errors import UsageError


def sections() -> list[type[Section]]:
    return [RunConfig, *Section.__subclasses__()]


def test_every_setting_has_a_description() -> None:
    bare = [
        f"{section.__name__}.{name}"
        for section in sections()
        for name, field in section.model_fields.items()
        if not field.description and not hasattr(field.annotation, "model_fields")
    ]
    assert bare == []
    assert all(section.__doc__ for section in sections())


def test_only_the_inputs_and_the_output_must_be_given() -> None:
    required = {
        f"{section.__name__}.{name}"
        for section in sections()
        for name, field in section.model_fields.items()
        if field.is_required()
    }
    by_command = {"RunConfig.recipe", "RunConfig.model", "RunConfig.data"}
    assert required - by_command == {"RunConfig.out", "DataSet.files"}


def test_suggested_names_exist() -> None:
    known = set(settings())
    assert set(GIVEN_BY.values()) <= known
    meant = {answer.partition(",")[0] for answer in other_names().values()}  # an explanation may follow
    assert {tuple(name.split(".")) for name in meant - {"no"} if not name.startswith("--")} <= known
    assert not [answer for answer in other_names().values() if answer == "no"]


def test_common_names_of_trainers_win() -> None:
    *_, last = trainers()
    assert last == "common" and other_names()["save_safetensors"] == trainers()["common"]["save_safetensors"]


def test_documented_names_exist() -> None:
    known = {".".join(key) for key in settings()}
    assert known >= {
        *(f"parallel.{name}" for name in ("tp", "sp", "pp", "fsdp")),
        *(f"train.{name}" for name in ("steps", "global_batch_size", "micro_batch_size", "precision", "seed")),
        *(f"data.{name}" for name in ("seq_length", "packing", "seed")),
        *(f"optim.{name}" for name in ("lr", "min_lr", "schedule", "warmup_steps", "weight_decay", "clip_grad")),
        *(f"checkpoint.{name}" for name in ("every", "keep", "resume")),
    }


HOSTILE = (0, -1, 2**31, 2**64, 10**300, -(2**64), 1e300, 5e-324, -1e300, float("nan"), float("inf"), -float("inf"))
TESTED: dict[str, Any] = {"recipe": "sft", "out": "o", "model.path": "m", "data.files": ["d"]}
NEEDS: dict[str, dict[str, Any]] = {
    "distill.": {"recipe": "distill", "distill.teacher": "t"},
    "dpo.": {"recipe": "dpo"},
    "kto.": {"recipe": "kto"},
    "reward.": {"recipe": "reward"},
    "lora.": {"lora.rank": 8},
    "eval.": {"eval.generate": True, "eval.prompts": ["a"]},
    "tokenizer.": {"tokenizer.type": "NullTokenizer", "tokenizer.vocab_size": 9},
    "optim.muon_": {"optim.optimizer": "muon"},
    "train.initial_loss_scale": {"train.precision": "fp16"},
    "train.loss_scale_window": {"train.precision": "fp16"},
    "train.recompute_layers": {"train.recompute": "full"},
}
"""Settings with which others are in use, by the beginning of the names of those."""


def numeric_settings() -> Iterator[tuple[str, Any]]:
    for name, field in RunConfig.model_fields.items():
        section: Any = field.annotation
        if get_origin(section) is None and isinstance(section, type) and issubclass(section, Section):  # Python 3.10
            for inner, setting in section.model_fields.items():
                kinds = {kind for kind in (int, float) if re.search(rf"\b{kind.__name__}\b", str(setting.annotation))}
                if kinds and "dict" not in str(setting.annotation) and "tuple" not in str(setting.annotation):
                    yield f"{name}.{inner}", kinds


def checked(name: str, value: Any) -> RunConfig | None:
    """The config with this value; None if it is refused with a message that names the setting."""
    values = {
        **TESTED,
        **{key: needed for start, more in NEEDS.items() if name.startswith(start) for key, needed in more.items()},
        name: value,
    }
    try:
        return load_config(None, None, [], values)
    except UsageError as error:
        assert name.partition(".")[2] in str(error), (name, value, error)
        assert len(str(error)) < 1000
        return None


@pytest.mark.parametrize("name", [name for name, _ in numeric_settings()])
def test_numbers_have_bounds(name: str) -> None:
    """What is not refused can be computed with: it is a number that int64 and float64 represent."""
    for value in HOSTILE:
        config = checked(name, value)
        if config is not None:
            section, _, key = name.partition(".")
            accepted = getattr(getattr(config, section), key)
            if isinstance(accepted, int):
                assert abs(accepted) < (2**63 if key == "seed" else 2**31), value
            else:
                assert accepted is None or math.isfinite(accepted), value
    assert checked(name, 2**64) is None or float in dict(numeric_settings())[name]


def test_the_walk_finds_all_numbers() -> None:
    names = {name for name, _ in numeric_settings()}
    assert {"train.steps", "optim.lr", "data.seq_length", "lora.rank", "parallel.timeout_s"} <= names and len(
        names
    ) > 70
