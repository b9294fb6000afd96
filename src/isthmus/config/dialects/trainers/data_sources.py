"""Data sets of trainers as files, folders and names on the Hub."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from isthmus.config.dialects.trainers.trainer_config import TrainerConfig

_DATA_FILE = re.compile(r"\.(json|jsonl|ndjson|parquet|csv|tsv|txt)(\.(gz|gzip|zst|zstd))?$")
_HUB = "hf:"
"""Prefix of a data set on the Hub."""


@dataclass(frozen=True, slots=True)
class TrainerDataSet:
    files: tuple[str, ...]
    columns: Mapping[str, str] = field(default_factory=dict)
    """Fields of its records by the names of Isthmus, as ``data.columns``; empty: the names of Isthmus."""
    weight: float | None = None


def is_local(path: str) -> bool:
    """Whether a name is a path, or a data set as Isthmus names it."""
    return (
        path.startswith(_HUB)
        or _DATA_FILE.search(path) is not None
        or path.startswith((".", "/", "~"))
        or Path(path).exists()
        or path.count("/") > 1
    )


def hub_source(name: str, configuration: str | None = None, split: str | None = None) -> str:
    """``hf:ORG/NAME/CONFIGURATION:SPLIT``"""
    middle = f"/{configuration}" if configuration and configuration != "default" else ""
    return f"{_HUB}{name}{middle}:{split or 'train'}"


def whole_split(keys: TrainerConfig, name: str, split: str) -> str:
    """The split without a slice such as ``train[:20%]``."""
    base, bracket, _ = split.partition("[")
    if bracket:
        keys.translation.remark(f"{name}: {split}", "different", f"The data is the whole split {base}.")
    return base


def put_sources(keys: TrainerConfig, sources: Sequence[TrainerDataSet], name: str) -> None:
    """Set ``data.files``, or ``data.sets`` if there are weights."""
    columns = {key: field_ for source in sources for key, field_ in source.columns.items()}
    if any(dict(source.columns) != columns for source in sources):
        keys.refuse(name, "has data sets with different fields; rename them, or prepare each one with isthmus prepare")
        return
    if any(source.weight is not None for source in sources):
        sets: dict[str, object] = {}
        for source in sources:
            stem = re.sub(r"\W+", "_", Path(source.files[0].removeprefix(_HUB)).name) or "data"
            key = stem if stem not in sets else f"{stem}_{len(sets)}"
            weight = {} if source.weight is None else {"weight": float(source.weight)}
            sets[key] = {"files": list(source.files), **weight}
        keys.put("data.sets", sets, name)
    else:
        keys.put("data.files", [file for source in sources for file in source.files], name)
    if columns:
        keys.put("data.columns", columns, name)


def weighted(keys: TrainerConfig, name: str, sources: Sequence[TrainerDataSet], count: int) -> list[TrainerDataSet]:
    """The data sets with the weights of a key, which must have ``count``."""
    weights = keys.numbers(name)
    if weights and len(weights) != count:
        keys.refuse(name, f"has {len(weights)} weights for {count} data sets")
    if not weights or not len(weights) == count == len(sources):
        return list(sources)
    return [replace(source, weight=weight) for source, weight in zip(sources, weights, strict=True)]


def put_validation(keys: TrainerConfig, share_name: str, *, files: Sequence[str] = (), files_name: str = "") -> bool:
    """Validation files, or a share of the training data; whether there is any."""
    if files:
        keys.put("data.valid_files", list(files), files_name)
        keys.ignore(share_name, "There are validation files.") if keys.has(share_name) else keys.value(share_name)
        return True
    share = keys.number(share_name) or 0.0
    if share >= 1:
        keys.refuse(share_name, "is a number of samples; give data.valid_fraction, their share, and remove it")
        return False
    keys.put("data.valid_fraction", float(share), share_name)
    return share > 0
