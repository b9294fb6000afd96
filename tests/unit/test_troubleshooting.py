"""Each symptom on the troubleshooting page has tests that reproduce it, and messages that the program prints."""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECTIONS = re.split(r"^## ", (ROOT / "docs/how-to/troubleshooting.md").read_text(), flags=re.MULTILINE)[1:]
symptoms = pytest.mark.parametrize("section", SECTIONS, ids=[section.splitlines()[0] for section in SECTIONS])


def named_tests(section: str) -> list[str]:
    (comment,) = re.findall(r"<!-- tests: (.+?) -->", section, re.DOTALL)
    return comment.split()


def messages_of(section: str) -> list[str]:
    """The quoted messages; ``...`` stands for a value."""
    quoted = re.findall(r"^```text\n(.+?)^```", section, re.MULTILINE | re.DOTALL)
    return [line for block in quoted for line in block.splitlines()]


@functools.cache
def sources() -> dict[Path, str]:
    return {path: path.read_text() for path in (ROOT / "src").rglob("*.py")}


@functools.cache
def printed(path: Path) -> list[str]:
    """The texts in a source file, with ``...`` for each expression."""
    texts = []
    for node in ast.walk(ast.parse(sources()[path])):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.append(node.value)
        elif isinstance(node, ast.JoinedStr):
            texts.append("".join(part.value if isinstance(part, ast.Constant) else "..." for part in node.values))
    return texts


@symptoms
def test_named_tests_a_symptom_exist(section: str) -> None:
    for test in named_tests(section):
        path, _, name = test.partition("::")
        assert f"\ndef {name}(" in (ROOT / path).read_text(), test


@symptoms
def test_messages_are_those_of_the_program(section: str) -> None:
    """A message may end before that of the program."""
    for message in messages_of(section):
        parts = message.split("...")
        words = [word for part in parts for word in part.split()]
        pattern = re.compile(".*?".join(map(re.escape, parts)), re.DOTALL)
        likely = [path for path, source in sources().items() if all(word in source for word in words)]
        assert any(pattern.search(text) for path in likely for text in printed(path)), message


@symptoms
def test_a_test_of_the_symptom_reads_its_message(section: str) -> None:
    """Two words in a row of one of the messages are in one of the test files."""
    files = " ".join((ROOT / test.partition("::")[0]).read_text().replace("\\", "") for test in named_tests(section))
    parts = [part.split() for message in messages_of(section) for part in message.split("...")]
    pairs = [" ".join(words[at : at + 2]) for words in parts for at in range(len(words) - 1)]
    assert not pairs or any(pair in files for pair in pairs)
