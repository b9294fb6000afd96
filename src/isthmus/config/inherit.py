"""Config file inheritance: bases, overrides and environment variables.

``bases:`` (or ``extends:``) lists files relative to this one, or presets (``preset:NAME``). Later bases win over
earlier ones, the file over its bases, ``overrides:`` over the rest of the file. ``${VAR:default}`` has a default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isthmus.config.presets import Kind, config_path, preset_of
from isthmus.config.yaml_text import TEXT_BYTES, Key, Syntax, read_mapping, read_value
from isthmus.errors import UsageError
from isthmus.files.input_files import read_text

_BASES = ("bases", "extends")
_OVERRIDES = "overrides"
_FILES = {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
FILE_KEYS: dict[str, Any] = {
    "bases": {
        "description": "Base files, relative to this file, or preset:NAME; later ones win over earlier ones.",
        **_FILES,
    },
    "extends": {"description": "The same as bases.", **_FILES},
    "overrides": {"description": "Settings that win over the rest of the file.", "type": "object"},
}
"""JSON schema of the keys that are not settings."""
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::([^{}]*))?\}")


@dataclass(frozen=True, slots=True)
class Setting:
    """An empty mapping is an empty section."""

    key: Key
    value: Any
    origin: str
    """``file:line:column``; of a preset, its name and where the file of the user lists it."""


def read_settings(path: Path, on_error: Callable[[str], None], kind: Kind = "train") -> Iterator[Setting]:
    """The settings of a config file and its bases; later ones replace earlier ones.

    Errors about single values are passed to ``on_error``.
    """
    return _read(path, (), on_error, kind)


def _read(path: Path, chain: tuple[Path, ...], on_error: Callable[[str], None], kind: Kind) -> Iterator[Setting]:
    if path.resolve() in [earlier.resolve() for earlier in chain]:
        cycle = " -> ".join(str(file) for file in (*chain, path))
        raise UsageError(f"the bases of config files form a cycle: {cycle}. Remove one of the bases.")
    values, places = _load(path, chain)
    for base in _bases(values, places, path, kind):
        # Users cannot edit a preset: its settings and those of its bases have the place where their file lists it.
        preset = preset_of(path)
        hides_bases = chain and not preset_of(chain[0])
        listed_at = f"{_bases_place(values, path, places)}  " if preset_of(base) and not preset else ""
        for setting in _read(base, (*chain, path), on_error, kind):
            origin = preset if preset and hides_bases else f"{listed_at}{setting.origin}"
            yield replace(setting, origin=origin)
    overrides = values.pop(_OVERRIDES, None)
    for name in (*_BASES, _OVERRIDES):
        values.pop(name, None)
    yield from _leaves(values, (), (), path, places, on_error)
    if overrides is None:
        return
    if not isinstance(overrides, dict):
        raise UsageError(f"{_place(path, places, (_OVERRIDES,))}  {_OVERRIDES}  must be a mapping of settings.")
    yield from _leaves(overrides, (), (_OVERRIDES,), path, places, on_error)


def _load(path: Path, chain: tuple[Path, ...]) -> tuple[dict[str, Any], dict[Key, tuple[int, int]]]:
    if chain and (path.is_dir() or not path.exists()):
        chain_text = " -> ".join(str(file) for file in (*chain, path))
        raise UsageError(
            f"{path}: there is no such base file ({chain_text}). Bases are relative to the file that lists them."
        )
    missing = "config file. Check the path."
    text = read_text(path, TEXT_BYTES, missing=missing, what="a config file: it is not UTF-8 text")
    try:
        return read_mapping(text)
    except Syntax as error:
        place = f":{error.line}:{error.column}" if error.line else ""
        line = text.splitlines()[error.line - 1] if error.line and error.line <= len(text.splitlines()) else ""
        hint = "; inside braces, put ${...} in quotes" if "${" in line else ""
        raise UsageError(f"{path}{place}  {error.reason}{hint}") from error


def _bases(values: Mapping[str, Any], places: Mapping[Key, tuple[int, int]], path: Path, kind: Kind) -> list[Path]:
    base_keys = [name for name in _BASES if values.get(name) is not None]
    if len(base_keys) > 1:
        raise UsageError(f"{path} has both bases and extends, which mean the same. Keep one of them.")
    listed = values[base_keys[0]] if base_keys else []
    listed = [listed] if isinstance(listed, str) else listed
    if not isinstance(listed, list) or not all(isinstance(base, str) for base in listed):
        raise UsageError(f"{path}  {base_keys[0]}  must be a list of files, got {listed!r}.")
    try:
        return [path.parent / os.path.expanduser(config_path(str(_filled(base)), kind)) for base in listed]
    except UsageError as error:
        raise UsageError(f"{_bases_place(values, path, places)}  {error}") from error
    except KeyError as unset:
        name = unset.args[0]
        raise UsageError(
            f"{path}  {base_keys[0]}  {name} is not set; set it, or give a default: ${{{name}:...}}"
        ) from unset


def _leaves(
    values: Mapping[str, Any],
    prefix: Key,
    within: Key,
    path: Path,
    places: Mapping[Key, tuple[int, int]],
    on_error: Callable[[str], None],
) -> Iterator[Setting]:
    for name, value in values.items():
        key = (*prefix, str(name))
        origin = _place(path, places, (*within, *key))
        if isinstance(value, dict):
            yield Setting(key, {}, origin)
            yield from _leaves(value, key, within, path, places, on_error)
            continue
        try:
            yield Setting(key, _filled(value), origin)
        except KeyError as unset:
            name = unset.args[0]
            on_error(f"{origin}  {'.'.join(key)}  {name} is not set; set it, or give a default: ${{{name}:...}}")


def _bases_place(values: Mapping[str, Any], path: Path, places: Mapping[Key, tuple[int, int]]) -> str:
    name = next(name for name in _BASES if values.get(name) is not None)
    return f"{_place(path, places, (name,))}  {name}"


def _place(path: Path, places: Mapping[Key, tuple[int, int]], key: Key) -> str:
    if (preset := preset_of(path)) is not None:
        return preset
    # Values of an alias or a merge have no position.
    position = next((places[key[:depth]] for depth in range(len(key), 0, -1) if key[:depth] in places), (1, 1))
    return f"{path}:{position[0]}:{position[1]}"


def _filled(value: Any) -> Any:
    """Fill in environment variables, also as numbers or booleans; KeyError if one has no value and no default."""
    if isinstance(value, list):
        return [_filled(item) for item in value]
    if not isinstance(value, str) or not _VARIABLE.search(value):
        return value
    text = _VARIABLE.sub(_variable, value)
    try:
        read = read_value(text)
    except Syntax:
        return text
    return read if read is None or isinstance(read, bool | int | float) else text


def _variable(match: re.Match[str]) -> str:
    name, default = match.groups()
    if name in os.environ:
        return os.environ[name]
    if default is None:
        raise KeyError(name)
    return default
