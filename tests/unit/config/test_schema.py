"""Requirements on every setting of the schema."""

from __future__ import annotations

from isthmus.config.schema import RunConfig, Section
from isthmus.config.setting_errors import GIVEN_BY, other_names, settings, trainers


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
