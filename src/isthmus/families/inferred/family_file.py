"""The file of an inferred family, as ``isthmus convert --learn`` writes it: JSON, so reading it runs no code."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from isthmus.errors import DataError
from isthmus.families.family import Family
from isthmus.families.inferred.json_family import check_known_settings, read_family
from isthmus.families.inferred.nested import check_nested_settings, read_nested
from isthmus.families.inferred.related import check_related_settings, read_related
from isthmus.files.input_files import parse_json, read_bytes

FILE = "family.json"
"""Saved next to a checkpoint; conversion back to Hugging Face reads it."""
Families = Callable[[], Mapping[str, Family]]


def load_family(path: Path, families: Families) -> Family:
    """``families`` returns those that the file can refer to."""
    try:
        return _parsed(read_bytes(path).decode("utf-8"), families)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}.") from None
    except DataError as error:
        raise DataError(f"{path} is not a valid family: {error} Infer it again (isthmus convert --learn).") from None


@cache
def _parsed(text: str, families: Families) -> Family:
    """Cached, so that two models with the same file have the same family object."""
    try:
        data = parse_json(text)
    except ValueError as error:
        raise DataError(f"not JSON: {error}.") from None
    return read_data(data, families())


def read_data(data: Mapping[str, Any], families: Mapping[str, Family]) -> Family:
    """The family with these contents of its file; DataError if they are malformed."""
    if "language" in data:
        return read_nested(data, families)
    return read_related(data, families) if "like" in data else read_family(data)


def check_settings(family: Family, config: Mapping[str, Any]) -> None:
    """Raise UsageError for a config with settings that an inferred family does not support."""
    data = family.data or {}
    if "language" in data:
        check_nested_settings(data, config)
    else:
        (check_related_settings if "like" in data else check_known_settings)(data, config)


def write_family(family: Family) -> str:
    """One line per entry."""
    assert family.data is not None
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {_format(value)}" for key, value in family.data.items()) + "\n}\n"


def _format(value: Any) -> str:
    if isinstance(value, dict) and value:
        lines = [f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in value.items()]
        return "{\n" + ",\n".join(lines) + "\n }"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(f"  {json.dumps(entry)}" for entry in value) + "\n ]"
    return json.dumps(value)
