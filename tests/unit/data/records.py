"""Reads the records of one source."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from isthmus.data.readers.chunks import Record
from isthmus.data.readers.file_formats import chunk_records, read_chunks


def read_records(path: Path | str, **options: Any) -> Iterator[Record]:
    """The records of ``path`` in order; ``options`` are those of ``chunk_records``."""
    for chunk in read_chunks([path]):
        yield from chunk_records(chunk, **options)
