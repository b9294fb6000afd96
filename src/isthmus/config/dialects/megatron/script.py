"""The training that a shell script starts; what could not be known without running it is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from isthmus.config.dialects.megatron.condition import Branch, holds
from isthmus.config.dialects.megatron.expand import RUN_IT, Unknown, Value, Variables, added
from isthmus.config.dialects.megatron.shell import Command, Word, read_script
from isthmus.config.dialects.translation import World
from isthmus.errors import UsageError

_ASSIGNED = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)(\+?=)")
_ELEMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\[[^]]*\]\+?=")
_OPENS = ("if", "while", "until", "for", "case", "select", "{")
_CLOSES = ("fi", "done", "esac", "}")
_DECLARES = ("export", "declare", "local", "readonly", "typeset")
_PRINTS = ("echo", "printf", "cat")
_OF_A_TRAINING = ("--num-layers", "--micro-batch-size", "--lr")
"""One of them is among the arguments of every training, and not of what prepares its data."""
_WORLD = {
    "nproc_per_node": "nproc_per_node",
    "num_gpus": "nproc_per_node",
    "nnodes": "nnodes",
    "num_nodes": "nnodes",
    "node_rank": "node_rank",
    "master_addr": "master_addr",
    "master_port": "master_port",
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


def read_training(text: str, given: Sequence[str] = ()) -> Started:
    """The training that a script starts.

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
        what = "starts several trainings" if run.found else "starts no training (a Python file.py with --num-layers)"
        raise UsageError(f"the script {what}{where}. Give the arguments of the one that is meant after --.")
    return replace(run.found[0][1], exported=run.exported)


def read_command(words: Sequence[str]) -> Started:
    """A training by the words of one command; without a Python file among them they are its arguments alone."""
    at = next((place for place, word in enumerate(words) if word.endswith(".py")), None)
    if at is None:
        return Started("", tuple(words), World())
    return Started(words[at], tuple(words[at + 1 :]), _world(words[:at]))


class _Run:
    """The way of a shell through a script."""

    def __init__(self, given: Sequence[str]) -> None:
        self.variables = Variables(given)
        self.exported: dict[str, str] = {}
        self.found: list[tuple[int, Started]] = []
        self.within: list[Branch] = []

    def follow(self, commands: Iterable[Command]) -> None:
        piped = False
        for command in commands:
            if piped and command.after in ("|", "|&"):
                continue  # what a training's output goes through
            piped = False
            if (rest := self._structure(command)) is not None and not any(branch.dead for branch in self.within):
                piped = self._do(rest)

    def _structure(self, command: Command) -> Command | None:
        """Follow the words that make blocks of commands; what is left to be done."""
        words = list(command.words)
        while words:
            word = words[0].plain
            if word in _OPENS:
                # What a function does is not done where it stands.
                kind = "function" if word == "{" and command.after == ")" else str(word)
                self.within.append(Branch(kind, command.line))
                if word == "for" and len(words) > 1:
                    self.variables.held[words[1].plain or ""] = Unknown(
                        f"${words[1].plain} is set in a loop at line {command.line}. {RUN_IT}"
                    )
                if word in ("for", "case", "select"):
                    return None
            elif word in _CLOSES:
                if self.within:
                    self.within.pop()
                return None
            elif word in ("then", "elif", "else", "do") and self.within:
                self.within[-1].goes_on(str(word))
            elif word != "function":
                break
            words.pop(0)
        if not words:
            return None
        if self.within and self.within[-1].asking:
            self.within[-1].hears(holds(words, self.variables), command.after)
            return None
        return Command(command.line, words, command.after)

    def _do(self, command: Command) -> bool:
        """Do one command; whether it is a training."""
        words, ahead = list(command.words), list[Word]()
        if (first := words[0].plain) in _DECLARES:
            for word in words[1:]:
                self._assign(word, command, exported=first == "export")
            return False
        while words and words[0].parts and words[0].parts[0].kind == "text" and _ASSIGNED.match(words[0].parts[0].text):
            ahead.append(words.pop(0))
        for word in ahead:
            self._assign(word, command, exported=bool(words))
        if words and words[0].parts and (element := _ELEMENT.match(words[0].parts[0].text)):
            name = element.group(1)
            self.variables.held[name] = Unknown(f"an element of {name} is set at line {command.line}. {RUN_IT}")
            return False
        if not words or words[0].plain in _PRINTS:
            return False
        if words[0].plain == "shift":
            self.variables.shift()
            return False
        if words[0].plain == "unset":
            self.variables.held.update((word.plain or "", "") for word in words[1:])
            return False
        if words[0].plain == "eval":
            said = self.variables.words(words[1:])
            before = len(self.found)
            if not isinstance(said, Unknown):
                self.follow(read_script(" ".join(said), command.line))
            return len(self.found) > before
        return self._training(words, command.line)

    def _training(self, words: list[Word], line: int) -> bool:
        said = self.variables.words(words)
        if isinstance(said, Unknown):
            plain = [word.plain or "" for word in words]
            if any(word.endswith(".py") or "torchrun" in word for word in plain):
                raise UsageError(f"line {line}: {said.why}")
            return False
        started = read_command(said)
        if not started.script or not any(flag.split("=")[0] in _OF_A_TRAINING for flag in started.flags):
            return False
        if unsure := next((branch for branch in self.within if not branch.live), None):
            raise UsageError(f"line {line}: it is started within `{unsure.kind}` (line {unsure.line}). {RUN_IT}")
        self.found.append((line, started))
        return True

    def _assign(self, word: Word, command: Command, *, exported: bool) -> None:
        held = self.variables.held
        match = _ASSIGNED.match(word.parts[0].text) if word.parts else None
        if match is None:
            if exported and isinstance(known := held.get(word.plain or ""), str):
                self.exported[str(word.plain)] = known
            return
        name, how = match.groups()
        value: Value
        if word.items is not None:
            value = self.variables.words(word.items)
        else:
            first = replace(word.parts[0], text=word.parts[0].text[match.end() :])
            value = self.variables.text_of(Word(word.line, [first, *word.parts[1:]]))
        if unsure := next((branch for branch in self.within if not branch.live), None):
            value = Unknown(f"{name} is set within `{unsure.kind}` at line {unsure.line}. {RUN_IT}")
        elif command.after in ("&&", "||"):
            value = Unknown(f"{name} is set after {command.after} at line {command.line}. {RUN_IT}")
        elif how == "+=":
            value = added(held.get(name, ""), value)
        held[name] = value
        if exported:
            self.exported[name] = value if isinstance(value, str) else "..."


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
