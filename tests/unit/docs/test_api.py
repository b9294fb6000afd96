"""The page of the Python API has all public names, and each function, class and method on it has a description."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import isthmus

PAGE = (Path(__file__).resolve().parents[3] / "docs/reference/api.md").read_text()
DIRECTIVES = re.findall(r"^::: (\S+)((?:\n    .*)*)", PAGE, re.MULTILINE)


def target(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def test_each_public_name_is_on_the_page() -> None:
    headings = set(re.findall(r"^      heading: (\S+)$", PAGE, re.MULTILINE))
    assert {f"isthmus.{name}" for name in isthmus.__all__ if name != "__version__"} <= headings


@pytest.mark.slow
def test_what_is_on_the_page_has_a_description() -> None:
    missing = []
    for path, options in DIRECTIVES:
        value = target(path)
        members = vars(value).items() if "members: true" in options else ()
        shown = [(name, member) for name, member in members if not name.startswith("_")]
        for name, member in [("", value), *shown]:
            function = getattr(member, "fget", None) or getattr(member, "__func__", member)
            if (inspect.isfunction(function) or inspect.isclass(function)) and not inspect.getdoc(function):
                missing.append(f"{path}.{name}".rstrip("."))
    assert not missing
    assert len(DIRECTIVES) > 30
