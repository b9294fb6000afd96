"""Renames the fields of records to known names (``data.columns``)."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from isthmus.data.chat.chat_records import FIELDS
from isthmus.data.readers.chunks import Record
from isthmus.errors import DataError, UsageError

Columns = Mapping[str, str]
"""Known name -> name in the files."""


def check_columns(columns: Columns) -> None:
    for known, source in columns.items():
        if known not in FIELDS:
            near = get_close_matches(known, FIELDS, n=1) or (source in FIELDS and [f"{source}: {known}"])
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UsageError(f"data.columns: {known} is not a known field.{hint} Known: {', '.join(FIELDS)}.")


def rename_fields(record: Record, columns: Columns) -> Record:
    """Other fields are unchanged; DataError if a field of ``columns`` is missing."""
    for known, source in columns.items():
        if source not in record.value:
            near = get_close_matches(source, map(str, record.value), n=1)
            fields = ", ".join(map(str, record.value)) or "none"
            hint = f"Did you mean {known}: {near[0]}?" if near else f"Its fields: {fields}."
            raise DataError(f"{record.where}: no field {source}, which data.columns names for {known}. {hint}")
    rest = {name: cell for name, cell in record.value.items() if name not in columns.values()}
    return Record(rest | {known: record.value[source] for known, source in columns.items()}, record.where)
