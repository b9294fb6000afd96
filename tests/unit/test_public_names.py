"""Public names do not vanish: the record is docs/reference/public-names.json."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def names(repository: Path) -> dict[str, Any]:
    return runpy.run_path(str(repository / "docs" / "public_names.py"))


def test_no_public_name_has_vanished(names: dict[str, Any]) -> None:
    present, recorded = names["present"](), names["read_record"]()
    gone = [f"{place}: {name}" for place in recorded for name in sorted({*recorded[place]} - {*present[place]})]
    assert not gone, f"{gone} vanished: users rely on these names, see docs/reference/stability.md before removing one"


def test_new_names_are_in_the_record(names: dict[str, Any]) -> None:
    present, recorded = names["present"](), names["read_record"]()
    new = [f"{place}: {name}" for place in present for name in sorted({*present[place]} - {*recorded[place]})]
    assert not new, f"{new} are not recorded: run `make docs`"


def test_each_place_has_the_names_that_users_type(names: dict[str, Any]) -> None:
    present = names["present"]()
    for place, name in {
        "commands": "sft --model",
        "settings": "optim.lr",
        "python": "isthmus.convert(dtype)",
        "files of a run": "metrics.jsonl",
        "exit codes": "65",
    }.items():
        assert name in present[place], (place, name)
