"""The recorded outputs on the pages of the verbs have the form of what the verbs print."""

from __future__ import annotations

import os
import re
import runpy
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from isthmus.cli.main import app, parse_and_run

ROOT = Path(__file__).resolve().parents[3]
RECORDER: dict[str, Any] = runpy.run_path(str(ROOT / "docs/record_outputs.py"))
COMMANDS: dict[str, str] = RECORDER["COMMANDS"]
QUICK = (
    "version",
    "config show",
    "config ls",
    "config from-llamafactory",
    "config from-axolotl",
    "config from-trl",
    "config from-swift",
    "config from-env",
)
"""Verbs that print their result without a model."""


def form(text: str) -> list[str]:
    """The lines without the values of numbers, the plural after them, and the widths of columns."""
    text = re.sub(r"\b(error|warning)s\b", r"\1", text)
    lines = [re.sub(r"\d[\d,.:e+-]*", "0", re.sub(r" +", " ", line)).strip() for line in text.splitlines()]
    return [line for line in lines if line]


def recorded(verb: str) -> tuple[str, str]:
    """The command and its output."""
    command, _, output = (ROOT / f"docs/outputs/{verb.replace(' ', '-')}.txt").read_text().partition("\n")
    return command.removeprefix("$ "), output


def test_each_verb_has_an_output_or_a_reason() -> None:
    root: Any = typer.main.get_command(app)
    verbs = set()
    for name, command in root.commands.items():
        inner = getattr(command, "commands", None)
        verbs |= {f"{name} {leaf}" for leaf in inner} if inner else {name}
    assert COMMANDS.keys() | RECORDER["UNRECORDED"].keys() == verbs
    assert not COMMANDS.keys() & RECORDER["UNRECORDED"].keys()
    files = {path.stem for path in (ROOT / "docs/outputs").iterdir()}
    assert files == {verb.replace(" ", "-") for verb in COMMANDS}


@pytest.mark.parametrize("verb", COMMANDS)
def test_the_record_is_of_the_command(verb: str) -> None:
    command, output = recorded(verb)
    assert command == COMMANDS[verb]
    assert "Traceback" not in output and not re.search(r"/(tmp|root|home)/", output)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("outputs") / "work"
    folder.mkdir()
    for name, text in RECORDER["FILES"].items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("verb", QUICK)
def test_quick_verbs_print_the_recorded_lines(
    verb: str, inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(inputs)
    monkeypatch.setenv("COLUMNS", "100")
    assert parse_and_run(shlex.split(COMMANDS[verb])[1:]) == 0
    captured = capsys.readouterr()
    assert form(captured.err + captured.out) == form(recorded(verb)[1])


@pytest.mark.thorough
@pytest.mark.processes
def test_all_verbs_print_the_recorded_first_and_last_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines between them depend on machine and load."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]))
    folder = tmp_path / "work"
    folder.mkdir()
    RECORDER["make_inputs"](folder)
    differing: dict[str, Any] = {}
    for verb in COMMANDS:
        try:
            printed, record = form(RECORDER["run_verb"](verb, folder)), form(recorded(verb)[1])
        except RuntimeError as error:
            differing[verb] = str(error)
            continue
        if (printed[:1], printed[-1:]) != (record[:1], record[-1:]):
            differing[verb] = (printed[:1], printed[-1:], record[:1], record[-1:])
    assert not differing
