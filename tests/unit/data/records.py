"""Reads and writes the records of one source."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus.data.readers.chunks import Record
from isthmus.data.readers.file_formats import chunk_records, read_chunks


def read_records(path: Path | str, **options: Any) -> Iterator[Record]:
    """The records of ``path`` in order; ``options`` are those of ``chunk_records``."""
    for chunk in read_chunks([path]):
        yield from chunk_records(chunk, **options)


def write_records(path: Path, *records: dict[str, Any]) -> Path:
    """Write one JSON object a line; returns the path."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path
