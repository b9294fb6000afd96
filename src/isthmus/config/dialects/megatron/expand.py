"""What the words of a shell script stand for, as far as that can be known without running anything."""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus.config.dialects.megatron.shell import Part, Word, read_script

RUN_IT = "Run the script with `bash -x`, and give the command that it prints after --."
_WITH_DEFAULT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|[0-9]+)(:?[-+=])(.*)", re.S)
_OF_ARRAY = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\[[@*]\]")
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class Unknown:
    """A value that only running the script would tell."""

    why: str
    """One or two sentences."""


class Unset(Unknown):
    """That of a variable that nobody set."""


Value = str | list[str] | Unknown


class Variables:
    """What variables hold; those that nobody set are asked of the environment, as the shell does."""

    def __init__(self, given: Sequence[str]) -> None:
        """``given`` is what the script is called with."""
        self.given = list(given)
        self.held: dict[str, Value] = {str(number): word for number, word in enumerate(given, start=1)}

    def shift(self) -> None:
        """Forget ``$1``; ``$2`` takes its place, and so on."""
        self.held = {name: value for name, value in self.held.items() if not name.isdigit()}
        self.given = self.given[1:]
        self.held |= {str(number): word for number, word in enumerate(self.given, start=1)}

    def words(self, words: Sequence[Word]) -> list[str] | Unknown:
        """What the shell makes of words: variables filled in, what is not quoted cut at blanks."""
        found: list[str] = []
        for word in words:
            open_word: str | None = None
            for part in word.parts:
                value = self._value(part, word.line)
                if isinstance(value, Unknown):
                    return value
                if part.quoted and not isinstance(value, list):
                    open_word = (open_word or "") + value
                    continue
                if part.kind == "text":
                    open_word = (open_word or "") + str(value)
                    continue
                pieces = value if isinstance(value, list) else value.split()
                if pieces and not part.quoted:
                    pieces = [piece for each in pieces for piece in each.split()]
                if pieces:
                    begins = isinstance(value, str) and value[:1].isspace()
                    if open_word is not None and not begins:
                        pieces = [open_word + pieces[0], *pieces[1:]]
                    elif open_word is not None:
                        found.append(open_word)
                    found += pieces[:-1]
                    open_word = pieces[-1]
                    if isinstance(value, str) and value[-1].isspace():
                        found.append(open_word)
                        open_word = None
            if open_word is not None:
                found.append(open_word)
        return found

    def text_of(self, word: Word, unset: str | None = None) -> str | Unknown:
        """A word as one text; a variable that nobody set is ``unset``, where that is not None."""
        text = ""
        for part in word.parts:
            value = self._value(part, word.line)
            if unset is not None and isinstance(value, Unset):
                value = unset
            if isinstance(value, Unknown):
                return value
            text += " ".join(value) if isinstance(value, list) else value
        return text

    def _value(self, part: Part, line: int) -> Value:
        match part.kind:
            case "text":
                return part.text
            case "command":
                return Unknown(f"$({part.text.strip()}) at line {line} is not run. {RUN_IT}")
            case "sum":
                return self._sum(part.text, line)
        if array := _OF_ARRAY.fullmatch(part.text):
            found = self._look_up(array.group(1), line)
            return found.split() if isinstance(found, str) and not part.quoted else found
        if part.text in ("@", "*"):
            return list(self.given)
        if default := _WITH_DEFAULT.fullmatch(part.text):
            name, how, text = default.groups()
            value = self.held.get(name, os.environ.get(name))
            is_set = value is not None and not (how[0] == ":" and value in ("", []))
            if how[-1] == "+":
                return self._text(text, line) if is_set else ""
            return value if is_set and value is not None else self._text(text, line)
        if not re.fullmatch(r"\w+", part.text):
            return Unknown(f"${{{part.text}}} at line {line} is not read. {RUN_IT}")
        return self._look_up(part.text, line)

    def _look_up(self, name: str, line: int) -> Value:
        if (value := self.held.get(name, os.environ.get(name))) is not None:
            return value
        if name.isdigit():
            return Unset(f"${name} at line {line} is what the script is called with. Give it after the script's name.")
        return Unset(f"${name} at line {line} is not set, neither before it nor in the environment. Set it: {name}=...")

    def _text(self, text: str, line: int) -> str | Unknown:
        """A default, which may have variables of its own."""
        commands = list(read_script(f'"{text}"' if '"' not in text else text, line))
        return self.text_of(commands[0].words[0]) if commands else ""

    def _sum(self, text: str, line: int) -> str | Unknown:
        unknown: list[Unknown] = []

        def fill(match: re.Match[str]) -> str:
            value = self._look_up(match.group(1), line)
            if isinstance(value, str) and value.strip().lstrip("-").isdigit():
                return value
            unknown.append(
                value if isinstance(value, Unknown) else Unknown(f"{text} at line {line} is no sum. {RUN_IT}")
            )
            return "0"

        filled = re.sub(r"\$?\{?\b([A-Za-z_]\w*)\b\}?", fill, text)
        if unknown:
            return unknown[0]

        def add_up(node: ast.expr) -> int:
            match node:
                case ast.Constant(value=int() as number):
                    return number
                case ast.UnaryOp(op=ast.USub(), operand=operand):
                    return -add_up(operand)
                case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                    return _OPERATORS[type(op)](add_up(left), add_up(right))
            raise ValueError

        try:
            return str(add_up(ast.parse(filled.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return Unknown(f"$(({text})) at line {line} is not read. {RUN_IT}")


def added(old: Value, new: Value) -> Value:
    """What ``+=`` makes of two values."""
    for value in (old, new):
        if isinstance(value, Unknown):
            return value
    if isinstance(old, list) or isinstance(new, list):
        sides = [side if isinstance(side, list) else ([side] if side else []) for side in (old, new)]
        return [str(word) for side in sides for word in side]  # type: ignore[union-attr]
    return str(old) + str(new)
