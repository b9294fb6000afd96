"""Names in files reach the terminal without control characters."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

import isthmus
from isthmus.cli.terminal import note, say, show

EXACT = {
    "main.py": "version",
    "completion.py": "a script of this package",
    "doctor.py": "a table whose cells are escaped, with colours",
    "process.py": "escaped and without credentials",
    "terminal.py": "say and show",
}
"""Modules that print text themselves, and why."""


class Result:
    def as_dict(self) -> dict[str, object]:
        return {"first": ["model.\x1b[2J.weight", ("a\x9b31m", 2)]}


def test_a_result_has_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    show(Result(), as_json=False)
    output = capsys.readouterr().out
    assert output.split("\n") == [r"first  model.\x1b[2J.weight", r"       a\x9b31m, 2", ""]


def test_an_exact_text_is_changed_on_a_terminal_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    say("# a\x1b[2J", exact=True)
    note("b\x1b[2J")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    say("# a\x1b[2J", exact=True)
    assert capsys.readouterr() == ("# a\x1b[2J\n# a\\x1b[2J\n", "b\\x1b[2J\n")


@pytest.mark.slow
def test_commands_print_through_the_terminal_module() -> None:
    for path in Path(isthmus.__file__).with_name("cli").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            is_print = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
            if is_print and node.args and path.name not in EXACT:  # type: ignore[attr-defined]
                assert "dumps(" in ast.unparse(node), f"{path}:{node.lineno}"  # type: ignore[attr-defined]
