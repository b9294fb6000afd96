"""Megatron-LM's arguments by the names that its own code has for them, whoever said them and how."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from isthmus.config.dialects.megatron.otherwise import OTHERWISE
from isthmus.config.dialects.megatron.spelling import EXTRA, FLAGS, GONE, KINDS, NEVER, OTHER_MODELS
from isthmus.config.dialects.megatron.undone import NOT_AT_ALL, REFUSED
from isthmus.config.dialects.translation import Translation
from isthmus.errors import UsageError

DEFAULT = "not said: Megatron-LM's default"
"""The origin of a setting that nothing was said about."""


class Arguments:
    """What was said, with Megatron-LM's defaults for the rest."""

    def __init__(self) -> None:
        """Nothing was said."""
        self._values: dict[str, Any] = {}
        self._words: dict[str, str] = {}
        self._quiet: set[str] = set()
        self.complaints: list[str] = []
        """All that is wrong with them, to be told at once."""

    def say(self, name: str, value: Any, words: str, *, quiet: bool = False) -> None:
        """``name`` is ``value``, a plain value or the words of a flag, since ``words`` say so; the later word wins.

        With ``quiet`` no remark is made on it: nobody said it of this run.
        """
        (self._quiet.add if quiet else self._quiet.discard)(name)
        kind = kinds().get(name)
        try:
            self._values[name] = value if kind is None else _typed(kind[0], value)
        except ValueError as error:
            self.complaints.append(f"{words}  {error}")
        self._words[name] = words

    def said(self, name: str) -> bool:
        """Whether anything was said about it; null says nothing."""
        return self._values.get(name) is not None

    def said_of_this_run(self, name: str) -> bool:
        """Whether it was said of this run, and is no default of some program's."""
        return self.said(name) and name not in self._quiet

    def get(self, name: str) -> Any:
        """The value that was said, or Megatron-LM's default."""
        value = self._values.get(name)
        return kinds()[name][1] if value is None else value

    def words(self, *names: str) -> str:
        """What was said about them, as it was said."""
        return " ".join(self._words[name] for name in names if self.said(name)) or DEFAULT

    def forget(self, name: str) -> None:
        """Take back what was said about it."""
        self._values.pop(name, None)

    def remark_on_the_rest(self, translation: Translation) -> None:
        """A remark for the arguments that no setting has, a complaint for one without which it were another run."""
        alike: dict[tuple[str, str], list[str]] = {}
        for name, value in self._values.items():
            if name in NEVER:
                translation.remark(self._words[name], "mistaken", NEVER[name])
            elif name in fates() and value is not None:
                fate, why, neutral = fates()[name]
                if says_nothing(value, neutral):
                    continue
                if fate == "refused":
                    self.complaints.append(f"{self._words[name]}  {why}")
                elif name not in self._quiet:
                    alike.setdefault((fate, why), []).append(self._words[name])
        for (fate, why), said in alike.items():
            translation.remark(", ".join(said), fate, why)  # type: ignore[arg-type]

    def refuse_if_wrong(self) -> None:
        """Raise all complaints.

        Raises:
            UsageError: there are some.
        """
        if len(self.complaints) == 1:
            raise UsageError(self.complaints[0])
        if self.complaints:
            raise UsageError("\n  ".join([f"{len(self.complaints)} arguments cannot be:", *self.complaints]))


def read_flags(words: Sequence[str]) -> Arguments:
    """The arguments that a command line gives to ``pretrain_gpt.py``, in either spelling of its values."""
    found = Arguments()
    position = 0
    while position < len(words):
        flag, equals, value = words[position].partition("=")
        position += 1
        if not flag.startswith("--") or len(flag) < 3:
            found.complaints.append(f"{words[position - 1]}  is no flag, nor the value of one")
            continue
        values = [value] if equals else []
        while not equals and position < len(words) and not words[position].startswith("--"):
            values.append(words[position])
            position += 1
        said = " ".join([flag + (f"={value}" if equals else ""), *([] if equals else values)])
        name, fixed = name_of(flag[2:])
        if name is None:
            found.complaints.append(f"{flag}  is no argument of Megatron-LM{_near(flag)}")
        elif fixed is not None:
            found.say(name, fixed, said)
        elif name in kinds():
            found.say(name, values, said)
        else:
            found.say(name, values or True, said)
    return found


def name_of(word: str) -> tuple[str | None, bool | None]:
    """What the argument of a flag is called, and its value if the flag alone says it; None for an unknown one."""
    name = word.replace("-", "_")
    if name in FLAGS:
        return FLAGS[name]
    if is_known(name):
        return name, None
    for no in ("no_", "disable_"):
        if name.startswith(no) and is_known(name.removeprefix(no)):
            return name.removeprefix(no), False
    return None, None


def is_known(name: str) -> bool:
    """Whether there is an argument of this name, now or in an old release."""
    return name in kinds() or name in fates() or name in NEVER


def near(name: str) -> str | None:
    """The argument that may have been meant."""
    every = [*kinds(), *fates(), *FLAGS]
    return next(iter(difflib.get_close_matches(name, every, n=1)), None)


def _near(flag: str) -> str:
    guess = near(flag[2:].replace("-", "_"))
    return f" (did you mean --{guess.replace('_', '-')}?)" if guess else ""


@cache
def kinds() -> Mapping[str, tuple[str, Any]]:
    """Kind and default of every argument that is translated."""
    found: dict[str, tuple[str, Any]] = {}
    for table in (KINDS, EXTRA):
        for kind, names in table.items():
            for name, default in _entries(names):
                off = False if kind == "bool" else None
                found[name] = (kind, _typed(kind, [default]) if default else off)
    return found


@cache
def fates() -> Mapping[str, tuple[str, str, str]]:
    """What becomes of every other argument, why, and the value with which it changes nothing."""
    tables = {"otherwise": (OTHERWISE, GONE), "not at all": (NOT_AT_ALL, OTHER_MODELS), "refused": (REFUSED,)}
    return {
        name: (fate, why, default)
        for fate, group in tables.items()
        for table in group
        for why, names in table.items()
        for name, default in _entries(names)
    }


def _entries(names: str) -> Iterator[tuple[str, str]]:
    for entry in names.split():
        name, _, default = entry.partition("=")
        yield name, default


def says_nothing(value: Any, neutral: str) -> bool:
    """Whether a value is what the tables write as ``neutral``, so that nothing needs to be said of it."""
    if value is None or value is False or value in ([], {}, ""):
        return neutral == ""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    try:
        return float(text) == float(neutral)
    except ValueError:
        return text.lower() == neutral.lower()


def _typed(kind: str, value: Any) -> Any:
    """A value of its kind, of the words of a flag (a list of text) or of a plain value.

    Raises:
        ValueError: it is none.
    """
    words = value if isinstance(value, list) else [value]
    if value is None:
        return None
    if kind == "list":
        return words
    if kind == "layers":
        return _layers(value)
    if kind == "bool" and not words:
        return True
    if len(words) != 1:
        raise ValueError(f"takes one value, got {len(words)}" if kind != "bool" else "is a switch and takes no value")
    word = words[0]
    try:
        if kind == "bool":
            return {"true": True, "1": True, "false": False, "0": False}[str(word).lower()]
        if isinstance(word, bool):
            raise ValueError
        if kind == "int":
            return int(word) if isinstance(word, str | int) else int(str(word).removesuffix(".0"))
        if kind == "float":
            return float(word)
    except (KeyError, ValueError):
        wanted = {"int": "a whole number", "float": "a number", "bool": "true or false"}[kind]
        raise ValueError(f"is {wanted}, got {word!r}") from None
    return str(word)


def _layers(value: Any) -> Any:
    """A number, or a list of them written with + and *, as Megatron-LM takes it: ``([0]*3+[1]*1)*2``."""
    words = [value] if isinstance(value, str) else value
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        return value
    text = " ".join(words)

    def read(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() as number):
                return number
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as number)):
                return -number
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return [read(part) for part in parts]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return read(left) + read(right)
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return read(left) * read(right)
        raise ValueError

    try:
        found = read(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        raise ValueError(f"is a number, or a list such as [0]*1+[1]*26, got {text!r}") from None
    return found
