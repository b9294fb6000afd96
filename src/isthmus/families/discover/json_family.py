"""A family as a file of data: what ``isthmus convert --learn`` found and proved, read back without running anything.

It says what a module of this package says, in JSON: keys, traits, rules. What a module says by a function is said here
by a word out of a closed list, or by a formula of two settings such as ``hidden_size/num_attention_heads``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

from isthmus.errors import DataError
from isthmus.families.architecture import Architecture, Moe
from isthmus.families.family import Derived, Family, Fixed, Key
from isthmus.families.rules import expert_tensors
from isthmus.families.rules.rule import Init, Layers, Part, Rule, Shard
from isthmus.families.rules.sliding_window import Window, read_window

FORMAT = 1
FILE = "family.json"
"""What it is called beside a checkpoint, for the way back."""
_FORMULA = re.compile(r"(\w+)(?:([*/])(\w+))?(\*\*0\.5)?")
_NAME = re.compile(r"(?:[\w.-]|\{layer\}|\{expert\})+")
_SYMBOLS = re.compile(r"[VHFPNGDWEXS12](?:\*[VHFPNGDWEXS12])*")
_KINDS: Mapping[str, type] = {"int": int, "float": float, "bool": bool}
_MEANINGS: Mapping[str, Callable[[Any], float]] = {
    "inverse": lambda value: 1 / value,
    "inverse_root": lambda value: value**-0.5,
}
_BACK: Mapping[str, Callable[[Any], float]] = {
    "inverse": lambda value: 1 / value,
    "inverse_root": lambda value: value**-2,
}
_WORDS: Mapping[str, tuple[Any, ...]] = {
    "shard": get_args(Shard),
    "init": get_args(Init),
    "layers": get_args(Layers),
    "dtype": ("float32",),
    "strands": ("1", "G", "N"),
    "interleaved": (True, False),
    "transposed": (True, False),
    "stacked": (True, False),
    "alias": (True, False),
    "when": ("tie_embeddings", "moe.shared_ffn_hidden_size"),
    "unless": ("tie_embeddings",),
}
_FIELDS = {field.name for field in fields(Architecture)} | {f"moe.{field.name}" for field in fields(Moe)}
WHY = "the family was learned from a config that says otherwise; learn it for this model (isthmus convert --learn)"


def load_family(path: Path) -> Family:
    """The family in a file.

    Raises:
        DataError: it is not one, or says something that is not known.
    """
    try:
        return _parsed(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text: {error}.") from None
    except DataError as error:
        raise DataError(f"{path} is no family that is understood: {error} Learn it again.") from None


@cache
def _parsed(text: str) -> Family:
    """The same family for the same text, so that two models of it are seen to be of one family."""
    try:
        return read_family(json.loads(text))
    except (ValueError, RecursionError) as error:
        raise DataError(f"it is not JSON: {error}.") from None


def write_family(family: Family) -> str:
    """The text of the file that :func:`load_family` reads, a line for each entry; of a family that came from data."""
    assert family.data is not None
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {_laid_out(value)}" for key, value in family.data.items()) + "\n}\n"


def _laid_out(value: Any) -> str:
    if isinstance(value, dict) and value:
        lines = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(lines) + "\n }"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"
    return json.dumps(value)


def read_family(data: Mapping[str, Any]) -> Family:
    """A family from its data.

    Raises:
        DataError: something in it is missing, not known, or of another kind than it should be.
    """
    try:
        if data["format"] != FORMAT:
            raise DataError(f"its format is {data['format']!r}, {FORMAT} is read.")
        known = {"format", "name", "hf_architecture", "keys", "derived", "traits", "fixed", "window", "rope", "rules"}
        known |= {"without_bearing"}
        if unknown := sorted(data.keys() - known - {"ignorable", "proof"}):
            raise DataError(f"{', '.join(unknown)} is not known.")
        window = dict(data["window"])
        for name in data["without_bearing"]:
            _text(name)
        style = _one_of(window.get("style"), get_args(Window))
        absent = {told["hf"]: told.get("default") for told in data["keys"].values()}
        derived = {
            _field(name): Derived(formula(text, absent), lambda _value, _arch: {})
            for name, text in data["derived"].items()
        }
        if window.get("unrotated") == "full_attention":
            layers = formula(data["keys"]["num_layers"]["hf"], absent)
            derived["unrotated_layers"] = Derived(_without_window(style, window, layers), lambda _layers, _arch: {})
        return Family(
            name=_text(data["name"]),
            hf_architecture=_text(data["hf_architecture"]),
            keys={_field(name): _key(told, absent) for name, told in data["keys"].items()},
            rules=tuple(_rule(told) for told in data["rules"]),
            fixed={name: _fixed(told) for name, told in data["fixed"].items()},
            traits={_field(name): tuple(value) if isinstance(value, list) else value
                    for name, value in data["traits"].items()},
            derived=derived,
            sliding_window=style,
            sliding_window_default=window.get("default"),
            sliding_window_pattern=window.get("every"),
            rope_defaults=dict(data["rope"]["defaults"]),
            rope_names=dict(data["rope"]["names"]),
            ignorable=tuple(_text(ending) for ending in data.get("ignorable", ())),
            data=data,
        )  # fmt: skip
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{type(error).__name__}: {error}.") from None


def formula(text: str, absent: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """``a``, ``a*b``, ``a/b`` (whole) of settings and whole numbers, or the root of one (``a**0.5``).

    Args:
        text: the formula.
        absent: what settings are that a config leaves out.

    Raises:
        DataError: it is no formula; what is returned raises it where a setting is no number.
    """
    found = _FORMULA.fullmatch(text)
    if found is None:
        raise DataError(f"{text!r} is no formula.")
    left, sign, right, root = found.groups()

    def term(word: str, hf: Mapping[str, Any]) -> Any:
        value = int(word) if word.isdigit() else hf.get(word, absent.get(word))
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise DataError(f"config.json: {word} must be a number, got {value!r}.")
        return value

    def value(hf: Mapping[str, Any]) -> Any:
        result = term(left, hf)
        if sign == "*":
            result = result * term(right, hf)
        elif sign == "/":
            result = result // term(right, hf)
        return result**0.5 if root else result

    return value


def _key(told: Mapping[str, Any], absent: Mapping[str, Any]) -> Key:
    if unknown := sorted(told.keys() - {"hf", "kind", "default", "null", "optional", "as", "of"}):
        raise DataError(f"{', '.join(unknown)} of a key is not known.")
    given = {name: told[name] for name in ("default", "optional") if name in told}
    meaning = told.get("as")
    if meaning == "first_dense":
        layers = formula(_text(told["of"]), absent)
        dense = expert_tensors.first_dense(default=told.get("default", 0))
        return replace(dense, hf=_text(told["hf"]), decode=lambda number, hf: tuple(range(min(number, layers(hf)))))
    if meaning == "number_of_experts":
        width = formula(_text(told["of"]), absent)
        shared = expert_tensors.shared_width(_text(told["hf"]), default=told.get("default", 0))
        return replace(shared, decode=lambda number, hf: number * width(hf))
    if meaning is not None:
        _one_of(meaning, tuple(_MEANINGS))
        given["decode"] = lambda value, _hf: _MEANINGS[meaning](value)
        given["encode"] = lambda value, _arch: _BACK[meaning](value)
    if "null" in told:
        given["null"] = formula(told["null"], absent)
    return Key(_text(told["hf"]), kind=_KINDS[told.get("kind", "int")], **given)


def _without_window(
    style: Window, window: Mapping[str, Any], num_layers: Callable[[Mapping[str, Any]], Any]
) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
    return lambda hf: read_window(style, hf, window.get("default"), num_layers(hf), window.get("every"))[1]


class _Each(tuple[Any, ...]):
    """Contains lists, one element for each layer, that are all alike."""

    def __contains__(self, value: Any) -> bool:
        """Whether all elements are the first of this."""
        return isinstance(value, list) and all(each == self[0] for each in value)


def _fixed(told: Mapping[str, Any]) -> Fixed:
    if unknown := sorted(told.keys() - {"is", "each", "absent", "training"}):
        raise DataError(f"{', '.join(unknown)} of a fixed setting is not known.")
    if "each" in told:
        return Fixed(_Each((told["each"],)), WHY, absent=told["absent"], strict=True)
    if told.get("training", False):
        return Fixed((told["is"],), "training runs without dropout; set it to 0", training=True, absent=told["absent"])
    return Fixed((told["is"],), WHY, absent=told["absent"], strict=True)


def _rule(told: Mapping[str, Any]) -> Rule:
    how = {name: value for name, value in told.items() if name not in ("canonical", "parts")}
    for name, value in how.items():
        _one_of(value, _WORDS[name])
    parts = tuple(Part(_name(name), tuple(map(_symbol, symbols))) for name, *symbols in told["parts"])
    return Rule(canonical=_name(told["canonical"]), parts=parts, **how)


def _name(text: str) -> str:
    if not _NAME.fullmatch(text):
        raise DataError(f"{text!r} is no name of a tensor.")
    return text


def _symbol(text: str) -> str:
    if not _SYMBOLS.fullmatch(text):
        raise DataError(f"{text!r} is no size.")
    return text


def _field(name: str) -> str:
    if name not in _FIELDS:
        raise DataError(f"{name!r} is no field of an architecture.")
    return name


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise DataError(f"a text was wanted, got {value!r}.")
    return value


def _one_of(value: Any, words: tuple[Any, ...]) -> Any:
    if value not in words:
        raise DataError(f"{value!r} is none of {', '.join(map(str, words))}.")
    return value
