"""A family as a JSON file, as ``isthmus convert --learn`` writes it. Reading it runs no code.

It has the fields of a :class:`Family`, with names from a fixed list and formulas such as
``hidden_size/num_attention_heads`` in place of functions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, get_args

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import REQUIRED, SETTINGS
from isthmus.families.blocks.block import MAX_LAYERS
from isthmus.families.blocks.kinds import MIXER_KINDS
from isthmus.families.family import Derived, Family, Fixed, Key
from isthmus.families.rules import expert_tensors
from isthmus.families.rules.common_settings import METADATA, ROPE, WINDOW
from isthmus.families.rules.rule import HfPart, Rule, Shard
from isthmus.families.rules.sliding_window import Window, read_window

FORMAT = 1
_FORMULA = re.compile(r"(\w+)(?:([*/])(\w+))?(\*\*0\.5)?")
_NAME = re.compile(r"(?:[\w.-]|\{layer\}|\{expert\})+")
_SYMBOLS = re.compile(r"(?:Vh|[VHFPNGDWEXS12])(?:\*(?:Vh|[VHFPNGDWEXS12]))*")
_NOISE = re.compile(r".*(?:noise|jitter).*")
_KINDS: Mapping[str, type] = {"int": int, "float": float, "bool": bool}
_CONVERSIONS: Mapping[str, tuple[Callable[[Any], float], Callable[[Any], float]]] = {
    "inverse": (lambda value: 1 / value, lambda value: 1 / value),
    "inverse_root": (lambda value: value**-0.5, lambda value: value**-2),
}
"""From a setting to the field of the Architecture, and back."""
_RULE_VALUES: Mapping[str, tuple[Any, ...]] = {
    "shard": get_args(Shard),
    "init": ("normal", "ones", "zeros"),
    "layers": ("all", "dense", "moe", *MIXER_KINDS),
    "dtype": ("float32",),
    "strands": ("1", "G", "N"),
    "when": ("tie_embeddings", "moe.shared_ffn_hidden_size"),
    "unless": ("tie_embeddings",),
    **dict.fromkeys(("interleaved", "transposed", "stacked", "alias"), (True, False)),
}
_FIELDS = tuple(name for name in SETTINGS if "." not in name or name.startswith("moe."))
_REQUIRED = REQUIRED - {"family"}
_NO_SETTINGS: Mapping[str, Any] = {}
WHERE_UNKNOWN = (
    "the family was inferred, and inference does not show where the dropout applies; set it to 0 with model.config, "
    "and train.attention_dropout or train.hidden_dropout instead"
)
WHY = "the family was inferred from a config with another value; infer it for this model (isthmus convert --learn)"


def noise_of(fixed: Mapping[str, Mapping[str, Any]]) -> str | None:
    """Why a model with these fixed settings is not trained: one of them is the size of a noise."""
    names = [name for name, entry in fixed.items() if _NOISE.fullmatch(name) and entry.get("is")]
    return f"training would run without the noise of {names[0]}" if names else None


@contextmanager
def reading(data: Mapping[str, Any]) -> Iterator[None]:
    """Raise DataError for a file of another format, and for a field that is missing or of another type."""
    try:
        if data["format"] != FORMAT:
            raise DataError(f"format {data['format']!r} is not supported, only {FORMAT}.")
        yield
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{type(error).__name__}: {error}.") from None


def read_family(data: Mapping[str, Any]) -> Family:
    """Raise DataError if a field is missing, unknown or of the wrong type."""
    with reading(data):
        known = {"format", "name", "hf_architecture", "keys", "derived", "traits", "fixed", "window", "rope", "rules"}
        _check_fields(data, known | {"without_bearing", "ignorable", "proof"}, "a family")
        window = dict(data["window"])
        for name in data["without_bearing"]:
            _text(name)
        style = _one_of(window.get("style"), get_args(Window))
        if lacking := sorted(_REQUIRED - data["keys"].keys() - data["derived"].keys() - data["traits"].keys()):
            raise DataError(f"it has no {lacking[0]}.")
        absent = {key["hf"]: key.get("default") for key in data["keys"].values()}
        formulas = {name: parse_formula(text, absent) for name, text in data["derived"].items()}
        if window.get("unrotated") == "full_attention":
            layers = parse_formula(data["keys"]["num_layers"]["hf"], absent)
            formulas["unrotated_layers"] = _without_window(style, window, layers)
        return Family(
            name=_text(data["name"]),
            hf_architecture=_text(data["hf_architecture"]),
            keys={_one_of(name, _FIELDS): _key(key, absent) for name, key in data["keys"].items()},
            rules=tuple(map(_rule, data["rules"])),
            dropout={},
            fixed={name: read_fixed(fixed) for name, fixed in data["fixed"].items()},
            traits={
                _one_of(name, _FIELDS): tuple(value) if isinstance(value, list) else value
                for name, value in data["traits"].items()
            },
            derived={
                _one_of(name, _FIELDS): Derived(formula, lambda _value, _arch: _NO_SETTINGS)
                for name, formula in formulas.items()
            },
            sliding_window=style,
            sliding_window_default=window.get("default"),
            sliding_window_pattern=window.get("every"),
            rope_defaults=dict(data["rope"]["defaults"]),
            rope_names={_text(name): _text(own) for name, own in data["rope"]["names"].items()},
            ignorable=tuple(_text(ending) for ending in data.get("ignorable", ())),
            untrainable=noise_of(data["fixed"]),
            data=data,
        )


def parse_formula(text: str, absent: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], Any]:
    """A function of the config: ``a``, ``a*b`` or ``a//b`` (written ``a/b``) of settings and integers, or ``a**0.5``.

    ``absent`` has the defaults of the settings. The function raises DataError if a setting is not a number.
    """
    found = _FORMULA.fullmatch(text)
    if found is None:
        raise DataError(f"{text!r} is not a formula.")
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


def _key(entry: Mapping[str, Any], absent: Mapping[str, Any]) -> Key:
    _check_fields(entry, {"hf", "kind", "default", "null", "optional", "as", "of"}, "a key")
    given = {name: entry[name] for name in ("default", "optional") if name in entry}
    meaning = entry.get("as")
    if meaning == "first_dense":
        layers = parse_formula(_text(entry["of"]), absent)
        dense = expert_tensors.first_dense(default=entry.get("default", 0))
        return replace(
            dense, hf=_text(entry["hf"]), decode=lambda number, hf: tuple(range(min(number, layers(hf), MAX_LAYERS)))
        )
    if meaning == "number_of_experts":
        width = parse_formula(_text(entry["of"]), absent)
        shared = expert_tensors.shared_width(_text(entry["hf"]), default=entry.get("default", 0))
        return replace(shared, decode=lambda number, hf: number * width(hf))
    if meaning is not None:
        decode, encode = _CONVERSIONS[_one_of(meaning, tuple(_CONVERSIONS))]
        given["decode"] = lambda value, _hf: decode(value)
        given["encode"] = lambda value, _arch: encode(value)
    if "null" in entry:
        given["null"] = parse_formula(entry["null"], absent)
    return Key(_text(entry["hf"]), kind=_KINDS[entry.get("kind", "int")], **given)


def _without_window(
    style: Window, window: Mapping[str, Any], num_layers: Callable[[Mapping[str, Any]], Any]
) -> Callable[[Mapping[str, Any]], tuple[int, ...]]:
    return lambda hf: read_window(style, hf, window.get("default"), num_layers(hf), window.get("every"))[1]


class AllEqual(tuple[Any, ...]):
    """Contains all lists whose elements equal its first element."""

    def __contains__(self, value: Any) -> bool:
        return isinstance(value, list) and all(each == self[0] for each in value)


def read_fixed(entry: Mapping[str, Any]) -> Fixed:
    _check_fields(entry, {"is", "each", "absent", "training"}, "a fixed setting")
    if "each" in entry:
        return Fixed(AllEqual((entry["each"],)), WHY, absent=entry["absent"], strict=True)
    if entry.get("training", False):
        return Fixed((entry["is"],), WHERE_UNKNOWN, training=True, absent=entry["absent"])
    return Fixed((entry["is"],), WHY, absent=entry["absent"], strict=True)


def _rule(entry: Mapping[str, Any]) -> Rule:
    options = {name: value for name, value in entry.items() if name not in ("canonical", "parts")}
    for name, value in options.items():
        _one_of(value, _RULE_VALUES[name])
    parts = tuple(
        HfPart(_match(_NAME, name, "tensor name"), tuple(_match(_SYMBOLS, symbol, "size") for symbol in symbols))
        for name, *symbols in entry["parts"]
    )
    return Rule(canonical=_match(_NAME, entry["canonical"], "tensor name"), parts=parts, **options)


def _check_fields(entry: Mapping[str, Any], known: set[str], of: str) -> None:
    if unknown := sorted(entry.keys() - known):
        raise DataError(f"{', '.join(unknown)} is not a field of {of}.")


def _match(pattern: re.Pattern[str], text: str, what: str) -> str:
    if not pattern.fullmatch(text):
        raise DataError(f"{text!r} is not a {what}.")
    return text


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise DataError(f"expected a non-empty string, got {value!r}.")
    return value


def _one_of(value: Any, choices: tuple[Any, ...]) -> Any:
    if value not in choices:
        raise DataError(f"{value!r} is not one of {', '.join(map(str, choices))}.")
    return value


def check_known_settings(data: Mapping[str, Any], config: Mapping[str, Any]) -> None:
    """Raise UsageError if a config has settings that were absent when the family (the JSON ``data``) was inferred."""
    known = {key["hf"] for key in data["keys"].values()} | {*data["fixed"], *data["without_bearing"]}
    refuse_others(data, config, known | {*ROPE, *WINDOW, "sliding_window_pattern"})


def refuse_others(data: Mapping[str, Any], config: Mapping[str, Any], known: Container[str]) -> None:
    """Raise UsageError for settings that are neither known nor without effect."""
    if unknown := [key for key in config if key not in known and not METADATA.fullmatch(key)]:
        raise UsageError(f"config.json: {', '.join(unknown)} is not supported for {data['name']}: {WHY}.")
