"""docs/how-to/add-a-family.md names what a family has."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from isthmus.families.architecture import SETTINGS
from isthmus.families.family import Family
from isthmus.families.registry import all_families

PAGE = (Path(__file__).resolve().parents[3] / "docs/how-to/add-a-family.md").read_text(encoding="utf-8")
_FEATURES = PAGE[PAGE.index("| feature |") : PAGE.index("The [list of families]")]
ROWS = [line.strip("|").split("|") for line in _FEATURES.splitlines() if "`" in line]
FIELDS = {field.name for field in fields(Family)}


def test_every_field_of_a_family_is_explained() -> None:
    assert sorted(name for name in FIELDS if f"`{name}`" not in PAGE) == []


@pytest.mark.parametrize("row", ROWS, ids=[row[0].strip() for row in ROWS])
def test_a_relative_has_the_feature(row: list[str]) -> None:
    settings, families = (re.findall("`([^`]+)`", cell) for cell in row[1:3])
    assert families
    for family in (all_families()[name] for name in families):
        used = {*family.keys, *family.derived, *family.traits, *(name for name in FIELDS if getattr(family, name))}
        used |= {"stacked"} if any(rule.stacked for rule in family.rules) else set()
        assert set(settings) <= SETTINGS.keys() | FIELDS | {"stacked"}
        assert not settings or used & set(settings)
