"""The training that a shell script starts; what could not be known without running it is refused."""

from __future__ import annotations

import ast
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from isthmus.config.dialects.megatron.shell import Command, Part, Word, read_script
from isthmus.config.dialects.translation import World
from isthmus.errors import UsageError

_RUN_IT = "Run the script with `bash -x`, and give the command that it prints after --."
_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=)")
_WITH_DEFAULT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*|[0-9]+)(:?[-+=])(.*)", re.S)
_OF_ARRAY = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\[[@*]\]")
_OPENS = {"if": "if", "while": "while", "until": "until", "for": "for", "case": "case", "select": "select", "{": "{"}
_CLOSES = {"fi", "done", "esac", "}"}
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_PRINTS = ("echo", "printf", "cat")
_WORLD = {
    "nproc_per_node": "nproc_per_node",
    "num_gpus": "nproc_per_node",
    "nnodes": "nnodes",
    "num_nodes": "nnodes",
    "node_rank": "node_rank",
    "master_addr": "master_addr",
    "master_port": "master_port",
}
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}


@dataclass(frozen=True, slots=True)
class Started:
    """A training that somebody starts."""

    script: str
    """The Python file, as it is named; empty where only arguments are given."""
    flags: tuple[str, ...]
    world: World
    exported: Mapping[str, str] = field(default_factory=dict)
    """Variables of the environment that it is given."""


@dataclass(frozen=True, slots=True)
class _Unknown:
    """A value that only running the script would tell."""

    why: str


_Value = str | list[str] | _Unknown


def read_training(text: str, given: Sequence[str] = ()) -> Started:
    """The training that a script starts.

    Variables that it does not set are taken from the environment, as the shell does.

    Args:
        text: of the script.
        given: what it is called with: ``$1``, ``$2`` and so on.

    Raises:
        UsageError: it starts none, or several, or one whose arguments depend on what only running it would tell.
    """
    run = _Run(given)
    run.follow(read_script(text))
    if len(run.found) != 1:
        where = f" (lines {', '.join(str(line) for line, _ in run.found)})" if run.found else ""
        what = "starts several trainings" if run.found else "starts no training that could be told: no Python file.py"
        raise UsageError(f"the script {what}{where}. Give the arguments of the one that is meant after --.")
    return replace(run.found[0][1], exported=run.exported)


def read_command(words: Sequence[str]) -> Started:
    """A training by the words of one command; without a Python file among them they are its arguments alone."""
    at = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    if at is None:
        return Started("", tuple(words), World())
    return Started(words[at], tuple(words[at + 1 :]), _world(words[:at]))


class _Run:
    """What a shell would know on its way through a script."""

    def __init__(self, given: Sequence[str]) -> None:
        self.values: dict[str, _Value] = {str(number): word for number, word in enumerate(given, start=1)}
        self.exported: dict[str, str] = {}
        self.given = list(given)
        self.found: list[tuple[int, Started]] = []
        self.within: list[tuple[str, int]] = []
        """Compound commands that are open, and their lines."""

    def follow(self, commands: Any) -> None:
        skipped = False
        for command in commands:
            if skipped and command.after in ("|", "|&"):
                continue  # what a training's output goes through
            skipped = False
            words = command.words
            first = words[0].plain or ""
            if len(words) == 1 and command.after == "(" and first == "":
                continue
            while words and (words[0].plain in _OPENS or words[0].plain in ("then", "else", "elif", "do", "function")):
                if (name := words[0].plain) in _OPENS:
                    self.within.append((_OPENS[str(name)], command.line))
                    if name in ("for", "case", "select"):
                        if len(words) > 1 and name != "case":
                            self._set(
                                words[1].plain or "", _Unknown(f"it is set in a loop at line {command.line}. {_RUN_IT}")
                            )
                        words = []
                        break
                words = words[1:]
            if words and words[0].plain in _CLOSES:
                if self.within:
                    self.within.pop()
                continue
            if words:
                skipped = self._one(Command(command.line, words, command.after))

    def _one(self, command: Command) -> bool:
        """Do one command; whether it is a training."""
        words = command.words
        if (first := words[0].plain) in _DECLARES:
            for word in words[1:]:
                self._assign(word, command, exported=first == "export")
            return False
        if first == "unset":
            for word in words[1:]:
                self.values[word.plain or ""] = ""
            return False
        rest = list(words)
        ahead: list[Word] = []
        while rest and self._is_assignment(rest[0]):
            ahead.append(rest.pop(0))
        for word in ahead:
            self._assign(word, command, exported=bool(rest))
        if not rest:
            return False
        if rest[0].plain in _PRINTS:
            return False
        if rest[0].plain == "eval":
            inner = self._words(rest[1:])
            if isinstance(inner, list):
                before = len(self.found)
                self.follow(read_script(" ".join(inner), command.line))
                return len(self.found) > before
        return self._training(rest, command.line)

    def _training(self, words: list[Word], line: int) -> bool:
        expanded = self._words(words)
        if isinstance(expanded, _Unknown):
            plain = [word.plain or "" for word in words]
            if any(word.endswith(".py") for word in plain) or any("torchrun" in word for word in plain):
                raise UsageError(f"line {line}: {expanded.why}")
            return False
        started = read_command(expanded)
        if not started.script or not any(flag.startswith("--") for flag in started.flags):
            return False
        if not any(flag.split("=")[0] in ("--num-layers", "--micro-batch-size", "--lr") for flag in started.flags):
            return False  # one that prepares data, for one
        if self.within:
            name, at = self.within[-1]
            raise UsageError(f"line {line}: the training is started within `{name}` (line {at}). {_RUN_IT}")
        self.found.append((line, started))
        return True

    @staticmethod
    def _is_assignment(word: Word) -> bool:
        return bool(word.parts) and word.parts[0].kind == "text" and bool(_ASSIGNED.match(word.parts[0].text))

    def _assign(self, word: Word, command: Command, *, exported: bool) -> None:
        if not word.parts or not (match := _ASSIGNED.match(word.parts[0].text)):
            if exported and word.plain in self.values:
                known = self.values[str(word.plain)]
                self.exported[str(word.plain)] = known if isinstance(known, str) else "..."
            return
        name, how = match.groups()
        value: _Value
        if word.items is not None:
            value = self._words(word.items)
        else:
            first = replace(word.parts[0], text=word.parts[0].text[match.end() :])
            value = self._joined(Word(word.line, [first, *word.parts[1:]]))
        if self.within:
            kind, line = self.within[-1]
            value = _Unknown(f"{name} is set within `{kind}` at line {line}. {_RUN_IT}")
        elif command.after in ("&&", "||"):
            value = _Unknown(f"{name} is set after {command.after} at line {command.line}. {_RUN_IT}")
        elif how == "+=":
            value = _added(self.values.get(name, ""), value)
        self._set(name, value)
        if exported:
            self.exported[name] = value if isinstance(value, str) else "..."

    def _set(self, name: str, value: _Value) -> None:
        self.values[name] = value

    def _words(self, words: Sequence[Word]) -> list[str] | _Unknown:
        """What the shell makes of words: variables filled in, what is not quoted cut at blanks."""
        found: list[str] = []
        for word in words:
            open_word: str | None = None
            for part in word.parts:
                value = self._value(part, word.line)
                if isinstance(value, _Unknown):
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
            if open_word is not None:
                found.append(open_word)
        return found

    def _joined(self, word: Word) -> str | _Unknown:
        text = ""
        for part in word.parts:
            value = self._value(part, word.line)
            if isinstance(value, _Unknown):
                return value
            text += " ".join(value) if isinstance(value, list) else value
        return text

    def _value(self, part: Part, line: int) -> _Value:
        match part.kind:
            case "text":
                return part.text
            case "command":
                return _Unknown(f"$({part.text.strip()}) at line {line} is not run. {_RUN_IT}")
            case "sum":
                return self._sum(part.text, line)
        if array := _OF_ARRAY.fullmatch(part.text):
            found = self._look_up(array.group(1), line)
            return found.split() if isinstance(found, str) and not part.quoted else found
        if part.text in ("@", "*"):
            return list(self.given)
        if default := _WITH_DEFAULT.fullmatch(part.text):
            name, how, text = default.groups()
            value = self.values.get(name, os.environ.get(name))
            is_set = value is not None and not (how[0] == ":" and value in ("", []))
            if how[-1] == "+":
                return self._text(text, line) if is_set else ""
            return value if is_set and value is not None else self._text(text, line)
        if not re.fullmatch(r"\w+", part.text):
            return _Unknown(f"${{{part.text}}} at line {line} is not read. {_RUN_IT}")
        return self._look_up(part.text, line)

    def _look_up(self, name: str, line: int) -> _Value:
        if (value := self.values.get(name, os.environ.get(name))) is not None:
            return value
        if name.isdigit():
            return _Unknown(
                f"${name} at line {line} is what the script is called with. Give it after the script's name."
            )
        return _Unknown(
            f"${name} at line {line} is not set, neither before it nor in the environment. Set it: {name}=..."
        )

    def _text(self, text: str, line: int) -> str | _Unknown:
        """A default, which may have variables of its own."""
        commands = list(read_script(f'"{text}"' if '"' not in text else text, line))
        return self._joined(commands[0].words[0]) if commands else ""

    def _sum(self, text: str, line: int) -> str | _Unknown:
        unknown: list[_Unknown] = []

        def fill(match: re.Match[str]) -> str:
            value = self._look_up(match.group(1), line)
            if isinstance(value, str) and value.strip().lstrip("-").isdigit():
                return value
            unknown.append(
                value if isinstance(value, _Unknown) else _Unknown(f"{text} at line {line} is no sum. {_RUN_IT}")
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
            return _Unknown(f"$(({text})) at line {line} is not read. {_RUN_IT}")


def _added(old: _Value, new: _Value) -> _Value:
    for value in (old, new):
        if isinstance(value, _Unknown):
            return value
    if isinstance(old, list) or isinstance(new, list):
        sides = [side if isinstance(side, list) else ([side] if side else []) for side in (old, new)]
        return [str(word) for side in sides for word in side]  # type: ignore[union-attr]
    return str(old) + str(new)


def _world(words: Sequence[str]) -> World:
    """The ranks that a launcher before the Python file is told of."""
    found: dict[str, Any] = {}
    for place, word in enumerate(words):
        flag, equals, value = word.partition("=")
        if (name := _WORLD.get(flag.lstrip("-").replace("-", "_"))) is None or not flag.startswith("-"):
            continue
        value = value if equals else words[place + 1] if place + 1 < len(words) else ""
        if name == "master_addr":
            found[name] = value
        elif value.isdigit():
            found[name] = int(value)
        elif name != "nproc_per_node" or value not in ("gpu", "auto", "cpu"):
            raise UsageError(f"{flag} is a whole number, got {value!r}.")
    return World(**found)
