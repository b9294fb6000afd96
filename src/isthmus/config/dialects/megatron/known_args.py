"""Types and defaults of Megatron-LM's arguments, and why some have no setting, from ``arguments.yaml``."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from isthmus.config.yaml_text import read_value

TABLES: Mapping[str, Any] = read_value(Path(__file__).with_name("arguments.yaml").read_text(encoding="utf-8"))
SETTINGS: Mapping[str, str] = TABLES["settings"]
"""Argument by setting, both with the same value."""
ARGUMENTS: list[str] = TABLES["model"].split()
"""Arguments that define the model."""
NEVER: Mapping[str, str] = TABLES["never"]
"""Flags that Megatron-LM never had, and what to use instead."""
_RENAMED: Mapping[str, str] = {**TABLES["renamed"], **TABLES["other_names"]}
_FLAGS = {name: flag for flag, name in TABLES["renamed"].items()}
_FLAGS_OFF = {name: flag for flag, name in TABLES["turned_off"].items()}
_EXPECTED = {
    "int": "a whole number",
    "size": "a whole number of 1 or more",
    "float": "a number",
    "bool": "true or false",
}


def name_of(word: str) -> tuple[str | None, bool | None]:
    """The argument of a flag, and its value if the flag alone sets it; (None, None) for an unknown flag."""
    name = word.replace("-", "_")
    if name in _RENAMED:
        return _RENAMED[name], None
    if name in TABLES["turned_off"]:
        return TABLES["turned_off"][name], False
    if is_known(name):
        return name, None
    for no in ("no_", "disable_"):
        if name.startswith(no) and is_known(name.removeprefix(no)):
            return name.removeprefix(no), False
    return None, None


def words_of(name: str, value: Any) -> list[str]:
    """The flag that sets an argument to a value, and its words: the inverse of ``name_of`` and ``typed``."""
    flag = _FLAGS.get(name, name)
    if value is False:
        flag = _FLAGS_OFF.get(name, f"no_{name}")
    words = [f"--{flag.replace('_', '-')}"]
    if isinstance(value, bool):
        return words
    if kinds().get(name, ("",))[0] == "list":
        return [*words, *map(str, value)]
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    return [*words, f"[{text}]" if isinstance(value, list) else text]


def is_default(name: str, value: Any) -> bool:
    """Whether Megatron-LM has this value if no flag sets it."""
    if name in untranslated():
        return is_neutral(value, untranslated()[name][2])
    return value is None or bool(value == kinds()[name][1])


def is_known(name: str) -> bool:
    """Whether an argument of this name exists, now or in an old release."""
    return name in kinds() or name in untranslated() or name in NEVER


def near(name: str) -> str | None:
    names = [*kinds(), *untranslated(), *_RENAMED, *TABLES["turned_off"]]
    return next(iter(difflib.get_close_matches(name, names, n=1)), None)


def near_flag(flag: str) -> str:
    """The most similar flag, as the end of an error message."""
    guess = near(flag[2:].replace("-", "_"))
    return f" (did you mean --{guess.replace('_', '-')}?)" if guess else ""


@cache
def kinds() -> Mapping[str, tuple[str, Any]]:
    """Type and default of every translated argument."""
    result: dict[str, tuple[str, Any]] = {}
    for table in (TABLES["translated"], TABLES["extra"]):
        for kind, names in table.items():
            for name, default in entries(names):
                off = False if kind == "bool" else None
                result[name] = (kind, typed(kind, [default]) if default else off)
    return result


@cache
def untranslated() -> Mapping[str, tuple[Any, str, str]]:
    """Other arguments: the status or ``refused``, the reason, and the value without effect."""
    return {
        name: (status, why, default)
        for status in ("different", "unsupported", "refused")
        for why, names in TABLES[status].items()
        for name, default in entries(names)
    }


def entries(names: str) -> Iterator[tuple[str, str]]:
    """The names of a table and their values: ``name=value`` or ``name``."""
    for entry in names.split():
        name, _, default = entry.partition("=")
        yield name, default


def is_neutral(value: Any, neutral: str) -> bool:
    if value is None or value is False or value in ([], {}, ""):
        return neutral == ""
    text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    try:
        return float(text) == float(neutral)
    except ValueError:
        return text.lower() == neutral.lower()


def typed(kind: str, value: Any) -> Any:
    """Convert the words of a flag (a list of text) or a plain value; raises ValueError. None stays None."""
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
        if kind in ("int", "size"):
            number = int(word) if isinstance(word, str | int) else int(str(word).removesuffix(".0"))
            if kind == "size" and number < 1:
                raise ValueError
            return number
        if kind == "float":
            return float(word)
    except (KeyError, TypeError, ValueError):
        raise ValueError(f"must be {_EXPECTED[kind]}, got {word!r}") from None
    return str(word)


def _layers(value: Any) -> Any:
    """A number, or a list written with + and *, as in Megatron-LM: ``([0]*3+[1]*1)*2``."""
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
            case ast.BinOp(left=a, op=ast.Add(), right=b):
                return read(a) + read(b)
            case ast.BinOp(left=a, op=ast.Mult(), right=b):
                return read(a) * read(b)
        raise ValueError

    try:
        layers = read(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError):
        raise ValueError(f"must be a number, or a list such as [0]*1+[1]*26, got {text!r}") from None
    return layers
