"""A run's settings from a file, the command line's options and its overrides; checked as a whole."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from isthmus.config.inherit import read_settings
from isthmus.config.presets import Kind
from isthmus.config.schema import RunConfig
from isthmus.config.setting_errors import GIVEN_BY, dotted, reason
from isthmus.config.yaml_text import Key, Syntax, read_value, write_mapping
from isthmus.errors import UsageError

_TEXT = {("out",), ("model",), ("model", "path"), ("tokenizer", "path"), ("checkpoint", "resume")}
"""Settings whose override is text whatever it looks like: a folder may be named 2026-11-21."""
_SHORT: dict[Key, Key] = {("model",): ("model", "path")}
"""Sections that may be plain text, and the setting that is meant."""
_OPTIONS = {option.lstrip("-").replace("-", "_"): option for option in GIVEN_BY}


@dataclass(frozen=True, slots=True)
class Settled:
    """A run's settings as far as they are given, and where each of them is from."""

    given: dict[str, Any]
    """Sections and settings that files, flags and overrides set."""
    origins: Mapping[Key, str]
    """``file:line:column``, an option, or ``command line``."""
    config: RunConfig | None
    """All of it, checked and with defaults; None where that was not asked for."""


def load_config(
    recipe: str | None, file: Path | None, overrides: Sequence[str] = (), flags: Mapping[str, Any] | None = None
) -> RunConfig:
    """Read and check the settings of a run.

    Args:
        recipe: what the command is; a file that names another is refused. None leaves it to the file.
        file: YAML file, or None.
        overrides: ``optim.lr=2e-5`` and the like, the value in YAML; they win over flags, and the later over the
            earlier.
        flags: options by name (``model``, ``data``, ``out``, ``hf_every``) or by dotted setting; they win over the
            file. None means that an option was not given.

    Raises:
        MissingInput: there is no such file.
        UsageError: all that is wrong, each with its place, its name, the reason and the mend.
        IOFailure: the file cannot be read.
    """
    config = settle(recipe, file, overrides, flags).config
    assert config is not None
    return config


def settle(
    recipe: str | None,
    file: Path | None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    *,
    check: bool = True,
    kind: Kind = "train",
) -> Settled:
    """Like :func:`load_config`, and where every setting is from; with ``check`` off, nothing has to be complete.

    With ``check`` off, ``file`` may also be a model (``kind``): what is given then are the keys of its config.json.
    """
    draft = _Draft()
    if file is not None:
        draft.add_file(file, kind)
    for name, value in (flags or {}).items():
        if value is not None:
            option = _OPTIONS.get(name)
            draft.put(GIVEN_BY[option] if option else tuple(name.split(".")), _plain(value), option or "command line")
    for override in overrides:
        draft.add_override(override)
    if not check:
        draft.refuse_if_wrong()
        return Settled(draft.values, draft.origins, None)
    return Settled(draft.values, draft.origins, draft.check(recipe))


def dump(config: RunConfig) -> str:
    """The whole configuration as YAML; :func:`load_config` reads the same one back."""
    return write_mapping(config.model_dump(mode="json"))


def origins_of(values: Mapping[str, Any], origins: Mapping[Key, str]) -> Iterator[tuple[str, Any, str]]:
    """Each setting by its dotted name, its value and where it is from; what nobody set is the ``default``."""

    def walk(inner: Mapping[str, Any], prefix: Key) -> Iterator[tuple[str, Any, str]]:
        for name, value in inner.items():
            key = (*prefix, name)
            if isinstance(value, dict) and value:
                yield from walk(value, key)
            else:
                yield dotted(key), value, origins.get(key, "default")

    return walk(values, ())


class _Draft:
    """Settings that are not checked yet, with the origin of each, and the complaints so far."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.origins: dict[Key, str] = {}
        self.file: str | None = None
        self.complaints: list[str] = []

    def add_file(self, path: Path, kind: Kind) -> None:
        self.file = str(path)
        for setting in read_settings(path, self.complaints.append, kind):
            self.put(setting.key, setting.value, setting.origin)

    def add_override(self, override: str) -> None:
        name, equals, text = override.partition("=")
        key = tuple(name.strip().split("."))
        if not equals or not all(key):
            self.complaints.append(f"command line  {override}  is not an override; write it as section.setting=value")
            return
        try:
            value = read_value(text)
        except Syntax as error:
            # Much that is not YAML is a plain path.
            if key not in _TEXT:
                self.complaints.append(f"command line  {override}  the value is not YAML: {error.reason}")
                return
            value = text
        whole = isinstance(value, str) or key not in _TEXT or (key in _SHORT and isinstance(value, dict))
        self.put(key, value if whole else text, "command line")

    def put(self, key: Key, value: Any, origin: str) -> None:
        """Set one value; a mapping is laid over what is there, setting by setting."""
        key = _SHORT.get(key, key) if isinstance(value, str) else key
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                self.put((*key, str(name)), inner, origin)
            return
        place = self.values
        for depth, part in enumerate(key[:-1], start=1):
            if place.get(part) is None:
                place[part], self.origins[key[:depth]] = {}, origin
            if not isinstance(place[part], dict):
                self.complaints.append(f"{origin}  {dotted(key)}  {dotted(key[:depth])} has no settings of its own")
                return
            place = place[part]
        self.origins[key] = origin
        if value != {} or not isinstance(place.get(key[-1]), dict):  # an empty mapping takes nothing out of a section
            place[key[-1]] = value

    def refuse_if_wrong(self) -> None:
        """Raise all complaints so far."""
        if self.complaints:
            raise UsageError(_joined(self.complaints))

    def check(self, recipe: str | None) -> RunConfig:
        """The whole of it, with defaults."""
        named = self.values.setdefault("recipe", recipe) if recipe is not None else None
        if recipe is not None and named != recipe:
            reason_ = f"is {named!r}, but the command is {recipe}; use the command of that recipe or take the line out"
            self.complaints.append(self._line(("recipe",), reason_))
            self.values["recipe"] = recipe
        for name, section in RunConfig.model_fields.items():
            # A section that is absent or empty is checked like one that lacks everything, for complaints by setting.
            if hasattr(section.annotation, "model_fields") and self.values.get(name) is None:
                self.values[name] = {}
        config = self._validated()
        self.refuse_if_wrong()
        assert config is not None
        return config

    def _validated(self) -> RunConfig | None:
        """The settings as a whole; or None, and a complaint of each that is wrong.

        Pydantic stops in a section where a single setting is wrong, before it looks at how they go together. So those
        are set aside, and the rest is looked at again; what would only be wrong for want of them is not told.
        """
        told: set[Key] = set()
        aside: set[str] = set()
        values = self.values
        while True:
            try:
                config = RunConfig.model_validate(values)
                return None if told else config
            except ValidationError as errors:
                wrong = {_key_of(error): error for error in errors.errors(include_url=False)}
            values = copy.deepcopy(values)
            for key, error in wrong.items():
                why = reason(error, key)
                if key not in told and aside.isdisjoint(re.findall(r"\w+", why)):
                    self.complaints.append(self._line(key, why))
            if told.issuperset(wrong):
                return None
            told |= wrong.keys()
            for key, error in wrong.items():
                if error["type"] in ("missing", "lacks"):
                    _replace(values, key, "?")  # all that must be given are paths
                else:
                    aside.add(_replace(values, key, None))

    def _line(self, key: Key, why: str) -> str:
        """``origin  key  reason``; the origin is that of the key or of what holds it, or the file."""
        held_in = (self.origins[key[:depth]] for depth in range(len(key), 0, -1) if key[:depth] in self.origins)
        origin = next(held_in, self.file)
        return "  ".join(filter(None, [origin, dotted(key), why]))


def _key_of(error: Any) -> Key:
    """The setting that pydantic's record of an error is about."""
    key = tuple(str(part) for part in error["loc"])
    return key + tuple(error["ctx"]["key"].split(".")) if error["type"] in ("clash", "lacks") else key


def _replace(values: dict[str, Any], key: Key, value: Any) -> str:
    """Put another value, or with None nothing, where ``key`` or the list it is in stands; returns its last name."""
    *sections, name = key
    for section in sections:
        held = values.get(section)
        if isinstance(held, list | tuple) or (isinstance(held, str) and name.isdigit()):  # text may stand for a list
            name = section
            break
        if not isinstance(values.get(section), dict):
            values[section] = {}
        values = values[section]
    if value is None:
        values.pop(name, None)
    else:
        values[name] = value
    return name


def _plain(value: Any) -> Any:
    """Paths as text, also within a list."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _joined(complaints: list[str]) -> str:
    if len(complaints) == 1:
        return complaints[0]
    return "\n  ".join([f"{len(complaints)} things are wrong with the configuration:", *complaints])
