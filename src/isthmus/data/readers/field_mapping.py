"""Fields of records by the names known here, where the files call them otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from isthmus.data.chat.chat_records import FIELDS
from isthmus.data.readers.chunks import Record
from isthmus.errors import DataError, UsageError

Columns = Mapping[str, str]
"""Known name -> name in the files."""


def check_columns(columns: Columns) -> None:
    """Refuse a mapping to fields that nothing reads.

    Raises:
        UsageError: naming the first, and the nearest that is known.
    """
    for known, source in columns.items():
        if known not in FIELDS:
            near = get_close_matches(known, FIELDS, n=1) or (source in FIELDS and [f"{source}: {known}"])
            hint = f" Did you mean {near[0]}?" if near else ""
            raise UsageError(
                f"data.columns: {known}: no field of records has this name.{hint} Known: {', '.join(FIELDS)}."
            )


def renamed(record: Record, columns: Columns) -> Record:
    """The record with its fields under the known names; what else it has stays as it is.

    Raises:
        DataError: it lacks a field that ``columns`` names.
    """
    for known, source in columns.items():
        if source not in record.value:
            near = get_close_matches(source, map(str, record.value), n=1)
            hint = (
                f"Did you mean {known}: {near[0]}?"
                if near
                else f"It has {', '.join(map(str, record.value)) or 'none'}."
            )
            raise DataError(f"{record.where}: no field {source}, which data.columns names for {known}. {hint}")
    rest = {name: cell for name, cell in record.value.items() if name not in columns.values()}
    return Record(rest | {known: record.value[source] for known, source in columns.items()}, record.where)
