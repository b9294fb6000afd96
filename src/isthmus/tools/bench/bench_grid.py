"""The cells of a benchmark: rows (a config and its settings) times the values of the settings that vary."""

from __future__ import annotations

import itertools
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from isthmus.config.presets import config_path, kind_of
from isthmus.config.yaml_text import Syntax, read_mapping
from isthmus.errors import MissingInput, UsageError
from isthmus.files.input_files import read_bytes

MAX_CELLS = 10_000
_ROWS = "rows"
_CLOSING = {"[": "]", "{": "}"}
Words = Callable[[Sequence[str]], tuple[list[str], list[str]]]
"""Splits the words of a command line into config files and settings."""


@dataclass(frozen=True, slots=True)
class BenchCell:
    """One measurement."""

    name: str
    """The config, or the row of a table; empty without one."""
    file: Path | None
    settings: tuple[str, ...]
    """As on the command line of a run; later ones win."""
    varied: tuple[str, ...]
    """Settings that have another value in another cell."""
    nproc: int

    def __str__(self) -> str:
        return " ".join(filter(None, [self.name, f"--nproc {self.nproc}", *self.varied]))

    def as_dict(self) -> dict[str, Any]:
        return {"cell": str(self)} | asdict(self) | {"file": None if self.file is None else str(self.file)}


def make_cells(configs: Sequence[str], settings: Sequence[str], nproc: Sequence[int], words: Words) -> list[BenchCell]:
    """All cells, by config, number of ranks, and settings in their order, the last one varying fastest.

    Args:
        configs: config files, ``preset:NAME`` and tables (:func:`table_rows`); none: only settings.
        settings: ``section.setting=VALUE,VALUE``; they win over those of a table.
        nproc: numbers of ranks.
        words: reads the rows of tables.

    Raises:
        UsageError: a setting twice, an empty value, or more than ``MAX_CELLS`` cells.
    """
    names = [setting.partition("=")[0] for setting in settings]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UsageError(f"{twice} is given twice. Give all its values at once, such as {twice}=1,2.")
    axes = [
        [f"{name}={value}" for value in split_values(name, setting.partition("=")[2])]
        for name, setting in zip(names, settings, strict=True)
    ]
    rows = [row for config in configs for row in _rows(config, words)] or [("", None, [])]
    count = len(rows) * len(nproc) * math.prod(map(len, axes))
    if count > MAX_CELLS:
        raise UsageError(f"the grid has {count} cells, more than {MAX_CELLS}. Give fewer values.")
    return [
        BenchCell(
            name=name,
            file=file,
            settings=(*fixed, *values),
            varied=tuple(value for value, axis in zip(values, axes, strict=True) if len(axis) > 1),
            nproc=ranks,
        )
        for name, file, fixed in rows
        for ranks in nproc
        for values in itertools.product(*axes)
    ]


def split_values(name: str, text: str) -> list[str]:
    """The values between commas; a comma within brackets or quotes belongs to a value, such as ``[0.9,0.95],[0.8]``."""
    values, closing, value = [], "", ""
    for character in text:
        if closing:
            closing = closing[:-1] if character == closing[-1] else closing
        elif character in "'\"" and not value.strip():
            closing = character
        if character in _CLOSING and closing[-1:] not in ("'", '"'):
            closing += _CLOSING[character]
        if character == "," and not closing:
            values.append(value)
            value = ""
        else:
            value += character
    values = [part.strip() for part in (*values, value)]
    if len(values) > 1 and "" in values:
        raise UsageError(f"{name}={text} has an empty value. Write values as {name}=1,2 or {name}=[a,b],[c].")
    return values


def table_rows(path: Path) -> list[str] | None:
    """The rows of a table: a YAML file whose only key is ``rows``. Each row is a config and settings, as on a command
    line. None for another file."""
    try:
        values = read_mapping(read_bytes(path).decode("utf-8", "replace"))[0]
    except OSError as error:
        raise MissingInput(f"{path} cannot be read: {error.strerror}. Check the path.") from error
    except Syntax:
        return None  # reported with its line when the config is loaded
    if _ROWS not in values:
        return None
    rows = values[_ROWS]
    if len(values) > 1 or not isinstance(rows, list) or not rows or not all(isinstance(row, str) for row in rows):
        raise UsageError(
            f"{path}: a table for isthmus bench has the key rows only, a list of texts such as "
            f"'preset:llama2-7b-bf16-benchmark parallel.tp=8'; got keys {', '.join(values)}. Correct it."
        )
    return rows


def _rows(config: str, words: Words) -> list[tuple[str, Path | None, list[str]]]:
    """(name, file, settings) of a config, or of each row of a table."""
    path = config_path(config, kind_of(config))
    rows = table_rows(path)
    if rows is None:
        return [(config, config_path(config), [])]
    cells: list[tuple[str, Path | None, list[str]]] = []
    for row in rows:
        files, settings = words(shlex.split(row))
        if len(files) != 1:
            raise UsageError(f"{path}: the row {row!r} has {len(files)} configs, expected one. Correct it.")
        cells.append((row, config_path(files[0]), settings))
    return cells
