"""Loads the settings of a run from a config file, options and overrides, and validates them together."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from isthmus.config import deprecated_names
from isthmus.config.inherit import read_settings
from isthmus.config.presets import PREFIX, Kind, preset_of
from isthmus.config.schema import RunConfig
from isthmus.config.setting_errors import GIVEN_BY, dotted, reason
from isthmus.config.yaml_text import Key, Syntax, read_value, write_mapping
from isthmus.errors import UsageError

_TEXT = {("out",), ("model",), ("model", "path"), ("tokenizer", "path"), ("checkpoint", "resume")}
"""Settings whose override is text and not YAML: a folder may be named 2026-11-21."""
_SHORT: dict[Key, Key] = {("model",): ("model", "path")}
"""Sections that can be plain text, and the setting that the text is for."""
_EXCLUSIVE: Mapping[str, tuple[str, ...]] = {
    name: getattr(section.annotation, "exclusive", ()) for name, section in RunConfig.model_fields.items()
}
_PLACE = re.compile(r":\d+:\d+")
_OPTIONS = {option.lstrip("-").replace("-", "_"): option for option in GIVEN_BY}


@dataclass(frozen=True, slots=True)
class LoadedSettings:
    """The settings of a run and their origins."""

    values: dict[str, Any]
    """Settings of files, flags and overrides."""
    origins: Mapping[Key, str]
    """``file:line:column``, an option, or ``command line``."""
    config: RunConfig | None
    """Config with defaults, validated; None if not requested."""


def load_config(
    recipe: str | None,
    file: Path | None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    origins: Mapping[str, str] | None = None,
    replaced: Mapping[str, Any] | None = None,
    default_out: Callable[[Mapping[str, Any]], str] | None = None,
) -> RunConfig:
    """Load and validate the settings of a run.

    Args:
        recipe: the recipe of the command, an error if the file has another one. None: the file must have it.
        file: YAML file, or None.
        overrides: such as ``optim.lr=2e-5``, with YAML values; they win over flags, later ones over earlier ones.
            One of exclusive settings, such as train.steps and train.epochs, also replaces the file's other one.
        flags: options by name (``model``, ``data``, ``out``, ``hf_every``) or dotted setting; they win over the file.
            None: the option is not given.
        origins: for messages, where flags with a dotted name come from, if not from the command line.
        replaced: settings and whole sections, by dotted name, that replace the given ones; None: the default.
        default_out: makes ``out`` of the other settings if it is not given; None: it is required.

    Raises:
        UsageError: contains all errors, each with its file and line, setting, reason and a hint.
    """
    config = load_settings(recipe, file, overrides, flags, origins, replaced=replaced, default_out=default_out).config
    assert config is not None
    return config


def load_recorded(file: Path) -> RunConfig:
    """The ``config.yaml`` of a run folder of this or an earlier version, whose names are read without a warning.

    Raises:
        UsageError: as :func:`load_config`.
    """
    draft = _Draft(recorded=True)
    draft.add_file(file, "train")
    return draft.check(None)


def load_settings(
    recipe: str | None,
    file: Path | None,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
    origins: Mapping[str, str] | None = None,
    *,
    check: bool = True,
    kind: Kind = "train",
    replaced: Mapping[str, Any] | None = None,
    default_out: Callable[[Mapping[str, Any]], str] | None = None,
) -> LoadedSettings:
    """Like :func:`load_config`, with the origin of each setting.

    Without ``check`` the settings may be incomplete, and ``file`` can be a model (``kind``).
    """
    draft = _Draft()
    if file is not None:
        draft.add_file(file, kind)
    for name, value in (flags or {}).items():
        if value is not None:
            option = _OPTIONS.get(name)
            origin = option or (origins or {}).get(name, "command line")
            draft.put(GIVEN_BY[option] if option else tuple(name.split(".")), _plain(value), origin)
    for override in overrides:
        draft.add_override(override)
    for name, value in (replaced or {}).items():
        draft.replace(name, value)
    if default_out is not None and draft.values.get("out") is None:
        draft.put(("out",), default_out({"recipe": recipe, **draft.values}), "default")
    if not check:
        draft.raise_errors()
        return LoadedSettings(draft.values, draft.origins, None)
    return LoadedSettings(draft.values, draft.origins, draft.check(recipe))


def dump(config: RunConfig) -> str:
    """YAML that :func:`load_config` reads back."""
    return write_mapping(config.model_dump(mode="json"))


def origins_of(values: Mapping[str, Any], origins: Mapping[Key, str]) -> Iterator[tuple[str, Any, str]]:
    """(dotted name, value, origin); the origin of settings that are not given is ``default``."""

    def walk(inner: Mapping[str, Any], prefix: Key) -> Iterator[tuple[str, Any, str]]:
        for name, value in inner.items():
            key = (*prefix, name)
            if isinstance(value, dict) and value:
                yield from walk(value, key)
            else:
                yield dotted(key), value, origins.get(key, "default")

    return walk(values, ())


class _Draft:
    def __init__(self, *, recorded: bool = False) -> None:
        self.recorded = recorded
        self.values: dict[str, Any] = {}
        self.origins: dict[Key, str] = {}
        self.file: str | None = None
        self.errors: list[str] = []

    def add_file(self, path: Path, kind: Kind) -> None:
        self.file = preset_of(path) or str(path)
        settings = list(read_settings(path, self.errors.append, kind))
        if kind == "train":
            _refuse_other_trainers(path, {setting.key[0]: setting.value for setting in settings})
        for setting in settings:
            self.put(setting.key, setting.value, setting.origin)

    def add_override(self, override: str) -> None:
        name, equals, text = override.partition("=")
        key = tuple(name.strip().split("."))
        if not equals or not all(key):
            self.errors.append(f"command line  {override:.200}  is not an override; use section.setting=value")
            return
        try:
            value = read_value(text)
        except Syntax as error:
            # Paths are often not YAML.
            if key not in _TEXT:
                self.errors.append(f"command line  {override:.200}  the value is not YAML: {error.reason}")
                return
            value = text
        replaces = isinstance(value, str) or key not in _TEXT or (key in _SHORT and isinstance(value, dict))
        self.put(key, value if replaces else text, "command line")

    def put(self, key: Key, value: Any, origin: str) -> None:
        """Set a value; a mapping is merged with the settings so far."""
        key = _SHORT.get(key, key) if isinstance(value, str) else key
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                self.put((*key, str(name)), inner, origin)
            return
        if (name := dotted(key)) in deprecated_names.SETTINGS:
            key = self._current_key(name, origin)
        self._drop_alternatives(key, value, origin)
        place = self.values
        for depth, part in enumerate(key[:-1], start=1):
            if place.get(part) is None:
                place[part], self.origins[key[:depth]] = {}, origin
            if not isinstance(place[part], dict):
                self.errors.append(f"{origin}  {dotted(key)}  {dotted(key[:depth])} is a setting and not a section")
                return
            place = place[part]
        self.origins[key] = origin
        if value != {} or not isinstance(place.get(key[-1]), dict):  # an empty mapping removes nothing from a section
            place[key[-1]] = value

    def _current_key(self, name: str, origin: str) -> Key:
        """The key of a renamed setting; a warning or an error names it."""
        renamed = deprecated_names.SETTINGS[name]
        key = tuple(renamed.to.split("."))
        if not self.recorded:
            if renamed.is_refused:
                self.errors.append(f"{origin}  {renamed.explain(name)}")
            elif key in self.origins and _file_of(self.origins[key]) == _file_of(origin):
                self.errors.append(f"{origin}  {name} and {renamed.to} are the same setting; leave out {name}")
            else:
                deprecated_names.warn(name, renamed, origin)
        return key

    def replace(self, name: str, value: Any) -> None:
        """Set a setting or section to exactly this value, None: to its default."""
        *sections, last = name.split(".")
        place = self.values
        for section in sections:
            if not isinstance(place.setdefault(section, {}), dict):
                return  # an error of its own
            place = place[section]
        place.pop(last, None)
        if value is not None:
            place[last] = copy.deepcopy(value)

    def _drop_alternatives(self, key: Key, value: Any, origin: str) -> None:
        """Remove exclusive settings that another file, which this one builds on, has chosen."""
        names = _EXCLUSIVE.get(key[0], ())
        if len(key) < 2 or key[1] not in names or value in (None, False, {}, []):
            return
        for other in ((key[0], name) for name in names if name != key[1]):
            if other in self.origins and _file_of(self.origins[other]) != _file_of(origin):
                self.values[key[0]].pop(other[1], None)
                self.origins = {name: place for name, place in self.origins.items() if name[:2] != other}

    def raise_errors(self) -> None:
        if self.errors:
            raise UsageError(_joined(self.errors))

    def check(self, recipe: str | None) -> RunConfig:
        recipe_in_file = self.values.setdefault("recipe", recipe) if recipe is not None else None
        if recipe is not None and recipe_in_file != recipe:
            in_preset = PREFIX in self.origins.get(("recipe",), "")
            hint = f"use the command of that recipe{'' if in_preset else ', or remove this line'}"
            reason_ = f"is {recipe_in_file!r}, but the command is {recipe}; {hint}"
            self.errors.append(self._line(("recipe",), reason_))
            self.values["recipe"] = recipe
        for name, section in RunConfig.model_fields.items():
            # An absent or empty section is validated like {}, for errors about its settings.
            if hasattr(section.annotation, "model_fields") and self.values.get(name) is None:
                self.values[name] = {}
        config = self._validated()
        self.raise_errors()
        assert config is not None
        return config

    def _validated(self) -> RunConfig | None:
        """The config, or None and an error for each wrong setting.

        Pydantic does not run the validators of a section with a wrong setting. So wrong settings are removed and the
        rest is validated again; errors about removed settings are not reported.
        """
        reported: set[Key] = set()
        removed: set[str] = set()
        values = self.values
        while True:
            try:
                config = RunConfig.model_validate(values)
                return None if reported else config
            except ValidationError as errors:
                wrong = {_key_of(error): error for error in errors.errors(include_url=False)}
            values = copy.deepcopy(values)
            for key, error in wrong.items():
                why = reason(error, key)
                if key not in reported and removed.isdisjoint(re.findall(r"\w+", why)):
                    self.errors.append(self._line(key, why, missing=error["type"] in ("missing", "lacks")))
            if reported.issuperset(wrong):
                return None
            reported |= wrong.keys()
            for key, error in wrong.items():
                if error["type"] in ("missing", "lacks"):
                    _replace(values, key, "?")  # all required settings are paths
                else:
                    removed.add(_replace(values, key, None))

    def _line(self, key: Key, why: str, *, missing: bool = False) -> str:
        """``origin  key  reason``; the origin is that of the key, of a section around it, or the file."""
        origins = (self.origins[key[:depth]] for depth in range(len(key), 0, -1) if key[:depth] in self.origins)
        if missing and key not in self.origins:  # the origin of a section is that of another setting, or a place
            origins = (origin for origin in origins if _PLACE.search(origin))
        origin = next(origins, self.file)
        return "  ".join(filter(None, [origin, dotted(key), why]))


def _refuse_other_trainers(path: Path, values: Mapping[str, Any]) -> None:
    """One error for a config of another program, not one for each of its keys."""
    if all(name in RunConfig.model_fields for name in values):
        return
    from isthmus.config.dialects.trainers.detect import trainer_of, translation_command

    program = trainer_of(values)
    if program is not None:
        command = translation_command(program, str(path))
        raise UsageError(
            f"{path} looks like a config of {program}. Translate it with `{command} > run.yaml`, which answers each "
            "key, and train with run.yaml."
        )


def _file_of(origin: str) -> str:
    """The file or preset of a setting; empty for options and overrides."""
    place = re.fullmatch(rf"(?:(.+):\d+:\d+)?(?:(?:  \w+  )?({PREFIX}.+))?", origin)
    return (place[2] or place[1] or "") if place else ""


def _key_of(error: Any) -> Key:
    key = tuple(str(part) for part in error["loc"])
    return key + tuple(error["ctx"]["key"].split(".")) if error["type"] in ("clash", "lacks") else key


def _replace(values: dict[str, Any], key: Key, value: Any) -> str:
    """Set (with None remove) the value of ``key`` or of the list that contains it; returns its last name."""
    *sections, name = key
    for section in sections:
        value_ = values.get(section)
        if isinstance(value_, list | tuple) or (isinstance(value_, str) and name.isdigit()):  # text for a list
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
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _joined(errors: list[str]) -> str:
    if len(errors) == 1:
        return errors[0]
    return "\n  ".join([f"the config has {len(errors)} errors:", *errors])
