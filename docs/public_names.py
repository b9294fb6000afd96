"""Records the names that users rely on, in docs/reference/public-names.json; see docs/reference/stability.md.

`make docs` adds new names to the record. It never removes one: tests/unit/test_public_names.py fails if a recorded name
no longer exists.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

import isthmus
from isthmus import errors
from isthmus.cli.main import app
from isthmus.config.deprecated_names import COMMANDS, PYTHON, SETTINGS, Renamed
from isthmus.config.schema import RunConfig

REFERENCE = Path(__file__).resolve().parent / "reference"
RECORD = REFERENCE / "public-names.json"
_FIRST_CELL = re.compile(r"^\| (`[^|]*) \|", re.MULTILINE)


def present() -> dict[str, list[str]]:
    """The public names of this code, by where users write them."""
    return {
        "commands": sorted({*_commands(typer.main.get_command(app), ""), *_accepted(COMMANDS)}),
        "settings": sorted({*_settings(RunConfig.model_json_schema()), *_accepted(SETTINGS)}),
        "values of settings": sorted(_values(RunConfig.model_json_schema())),
        "python": sorted({*_python(), *(f"isthmus.{name}" for name in _accepted(PYTHON))}),
        "files of a run": sorted(_run_folder()),
        "exit codes": sorted({f"{kind.exit_code}" for kind in _errors()}, key=int),
    }


def read_record() -> dict[str, list[str]]:
    record: dict[str, list[str]] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    return record


def record_new_names() -> None:
    recorded = read_record()
    merged = {place: sorted({*names, *recorded.get(place, [])}) for place, names in present().items()}
    RECORD.write_text(json.dumps(merged, indent=1) + "\n")


def _commands(command: Any, name: str) -> Iterator[str]:
    """``sft --model``: each verb with each spelling of its options."""
    for option in command.params:
        if option.param_type_name == "option":
            for spelling in (*option.opts, *option.secondary_opts):
                yield f"{name} {spelling}".strip()
    for verb, inner in getattr(command, "commands", {}).items():
        words = f"{name} {verb}".strip()
        yield words
        yield from _commands(inner, words)


def _settings(schema: Mapping[str, Any]) -> Iterator[str]:
    for name, entry in schema["properties"].items():
        reference = entry.get("$ref", "").rpartition("/")[2]
        inner = schema["$defs"][reference].get("properties", {}) if reference else {}
        yield from (f"{name}.{setting}" for setting in inner)
        if not inner:
            yield name


def _values(schema: Mapping[str, Any]) -> Iterator[str]:
    """``optim.schedule=cosine``: each value of the settings that have a list of them."""
    for section, entry in schema["properties"].items():
        reference = entry.get("$ref", "").rpartition("/")[2]
        inner = schema["$defs"][reference].get("properties", {}) if reference else {}
        settings = {f"{section}.{name}": setting for name, setting in inner.items()} or {section: entry}
        for name, setting in settings.items():
            for choice in (setting, *setting.get("anyOf", ()), setting.get("items", {})):
                yield from (f"{name}={value}" for value in choice.get("enum", ()))


def _accepted(table: Mapping[str, Renamed]) -> set[str]:
    """The earlier names that this version accepts, with a warning."""
    return {name for name, renamed in table.items() if not renamed.is_refused}


def _python() -> Iterator[str]:
    """``isthmus.sft(config)``: each function of the package with its parameters, and methods of its classes."""
    for name in isthmus.__all__:
        value = getattr(isthmus, name)
        if name == "convert":
            value = importlib.import_module("isthmus.convert.transfer").convert
        if not callable(value):
            yield f"isthmus.{name}"
            continue
        yield from _parameters(f"isthmus.{name}", value)
        if inspect.isclass(value):
            methods: Sequence[tuple[str, Any]] = inspect.getmembers(value, inspect.isfunction)
            for method, function in methods:
                if not method.startswith("_"):
                    yield from _parameters(f"isthmus.{name}.{method}", function)


def _parameters(name: str, function: Any) -> Iterator[str]:
    yield name
    for parameter in inspect.signature(function).parameters:
        if parameter != "self":
            yield f"{name}({parameter})"


def _run_folder() -> Iterator[str]:
    """Files and keys of the tables of the page about the run folder."""
    for cell in _FIRST_CELL.findall((REFERENCE / "run-folder.md").read_text()):
        yield from re.findall(r"`([^`]+)`", cell)


def _errors() -> Iterator[type[errors.IsthmusError]]:
    for value in vars(errors).values():
        if inspect.isclass(value) and issubclass(value, errors.IsthmusError):
            yield value


if __name__ == "__main__":
    record_new_names()
