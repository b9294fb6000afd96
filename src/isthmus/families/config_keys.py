"""The settings of a ``config.json`` that a family reads and writes: keys, fixed values and derived fields."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.blocks.block import MAX_INT

Value = TypeVar("Value")
_REQUIRED = object()
_MAX_FLOAT = 1e38  # of float32
_TYPE_NAMES = {int: "positive integer", float: "non-negative number", bool: "boolean"}


@dataclass(frozen=True, slots=True)
class Key:
    """A key of ``config.json``: its name, its type, and what transformers assumes if it is absent or null."""

    hf: str
    kind: type = int
    default: Any = _REQUIRED
    null: Callable[[Mapping[str, Any]], Any] | None = None
    choices: Mapping[Any, Any] | None = None
    """The field's value for each supported setting; of several settings with one value, the first is written."""
    least: int = 1
    """Smallest value of an integer."""
    optional: bool = False
    """Null means None instead of the default."""
    aliases: tuple[str, ...] = ()
    """Other names of the key."""
    decode: Callable[[Any, Mapping[str, Any]], Any] | None = None
    """Computes the field of the Architecture from the setting and the whole config, if they differ."""
    encode: Callable[[Any, Architecture], Any] | None = None
    """The inverse of ``decode``."""

    def read(self, hf: Mapping[str, Any]) -> Any:
        """Read the field's value; DataError if it is missing or malformed, UsageError if it is not supported."""
        name = next((name for name in (self.hf, *self.aliases) if name in hf), self.hf)
        value = hf.get(name, None if self.default is _REQUIRED else self.default)
        if value is None and self.null is not None:
            value = self.null(hf)
        if value is None and self.optional:
            return None
        if value is None:
            raise DataError(f"config.json: {self.hf} is missing.")
        if self.choices is not None:
            if not isinstance(value, Hashable) or value not in self.choices:
                raise UsageError(
                    f"config.json: {self.hf}={_short(value)} is not supported; {_either(self.choices)} is."
                )
            return self.choices[value]
        fits = isinstance(value, int | float if self.kind is float else self.kind)
        if self.kind in (int, float) and fits:
            least, most = (self.least, MAX_INT) if self.kind is int else (0, _MAX_FLOAT)
            fits = not isinstance(value, bool) and least <= value <= most
        if not fits:
            expected = _TYPE_NAMES[self.kind] if self.least else "non-negative integer"
            raise DataError(f"config.json: {self.hf} must be a {expected}, got {value!r:.60}.")
        value = self.kind(value)
        try:
            return value if self.decode is None else self.decode(value, hf)
        except ZeroDivisionError:
            raise DataError(f"config.json: {self.hf} must not be 0.") from None

    def write(self, value: Any, arch: Architecture) -> Any:
        """The setting for a field's value; UsageError if no setting expresses it."""
        if self.choices is not None:
            settings = [setting for setting, meaning in self.choices.items() if meaning == value]
            if not settings:
                raise UsageError(f"config.json cannot express {value} as {self.hf}; it can be {_either(self.choices)}.")
            return settings[0]
        return value if self.encode is None or value is None else self.encode(value, arch)


@dataclass(frozen=True, slots=True)
class Fixed:
    """The supported values of a setting, and why others are rejected. If absent or null it has the first value."""

    allowed: tuple[Any, ...]
    why: str
    training: bool = False
    """It does not change tensors or logits; other values are rejected only for training."""
    absent: Any = None
    """The value if the key is absent, if not the first one."""
    strict: bool = False
    """Null is supported only if it is listed."""

    def check(self, key: str, hf: Mapping[str, Any], family: str) -> None:
        """Raise a UsageError if ``key`` has another value."""
        value = hf.get(key, self.absent)
        if (value is not None or self.strict) and value not in self.allowed:
            raise UsageError(f"config.json: {key}={_short(value)} is not supported for {family}: {self.why}.")


@dataclass(frozen=True, slots=True)
class Derived:
    """A field of the Architecture that depends on several settings."""

    read: Callable[[Mapping[str, Any]], Any]
    write: Callable[[Any, Architecture], Mapping[str, Any]]


def with_defaults(keys: Mapping[str, Key], **defaults: Any) -> dict[str, Key]:
    """The keys with other defaults, which are given by Hugging Face name."""
    if unknown := defaults.keys() - {key.hf for key in keys.values()}:
        raise TypeError(f"no key is called {min(unknown)}")
    return {name: replace(key, default=defaults[key.hf]) if key.hf in defaults else key for name, key in keys.items()}


def without(entries: Mapping[str, Value], *names: str) -> dict[str, Value]:
    """The other entries of a table of keys, fixed values or derived fields."""
    return {name: entry for name, entry in entries.items() if name not in names}


def dropout_rate(name: str, default: float = 0.0) -> Key:
    """A key of :attr:`Family.dropout`; null means the default."""
    return Key(name, kind=float, default=default, null=lambda _hf: default)


def dropout_rates(default: float = 0.0, **names: str) -> dict[str, Key]:
    """The keys of :attr:`Family.dropout`, by its fields, with one default."""
    return {field: dropout_rate(name, default) for field, name in names.items()}


def _either(values: Iterable[Any]) -> str:
    return " or ".join(map(str, values))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
