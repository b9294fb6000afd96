"""Rows of CSV and TSV files as records; the first row contains the field names."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count, takewhile

from isthmus.data.readers.chunks import CHUNK_BYTES, RECORD_BYTES, Record, read_line
from isthmus.data.readers.decompress import open_decompressed
from isthmus.data.readers.json_chunks import decode_utf8
from isthmus.errors import DataError


@dataclass(frozen=True, slots=True)
class CsvChunk:
    """``rows``: (line number, cells)."""

    path: str
    names: list[str]
    rows: list[tuple[int, list[str]]]

    def parse(self) -> Iterator[Record | DataError]:
        """A row with more or fewer cells than names is yielded as an error."""
        for line, row in self.rows:
            where = f"{self.path}:{line}"
            if len(row) == len(self.names):
                yield Record(dict(zip(self.names, row, strict=True)), where)
            else:
                yield DataError(f"{where}: {len(row)} cells in a table of {len(self.names)} columns.")


def table_chunks(path: str, *, tabs: bool) -> Iterator[CsvChunk]:
    """The rows of a UTF-8 table; quoted cells may contain line breaks and doubled quotes.

    Columns are separated by tabs if ``tabs``; else by the first of comma, tab and semicolon in the column names. Blank
    lines before them are skipped.
    """
    csv.field_size_limit(RECORD_BYTES)  # a longer cell has an unclosed quote
    with open_decompressed(path) as file:
        numbered = ((number, read_line(file, path, number)) for number in count(1))
        lines = (decode_utf8(raw, path, number) for number, raw in takewhile(lambda line: line[1], numbered))
        first, blank = next(lines, "").removeprefix("\ufeff"), 0
        while first and not first.strip():
            first, blank = next(lines, ""), blank + 1
        delimiter = "\t" if tabs else next((mark for mark in ",\t;" if mark in first), ",")
        reader = csv.reader(chain([first], lines), delimiter=delimiter, strict=True)
        names: list[str] | None = None
        rows: list[tuple[int, list[str]]] = []
        size, line, seen = 0, 1 + blank, False
        try:
            for row in reader:
                begins, line = line, reader.line_num + 1 + blank
                if not row:  # a blank line
                    continue
                if names is None:
                    names = _names(row, path, begins)
                    continue
                seen = True
                rows.append((begins, row))
                size += sum(map(len, row))
                if size >= CHUNK_BYTES:
                    yield CsvChunk(path, names, rows)
                    rows, size = [], 0
        except csv.Error as error:
            raise DataError(
                f"{path}:{line}: not a row of a table: {error}. Is a quote not closed, or not doubled?"
            ) from error
        if names is None or not seen:
            raise DataError(f"{path}: the table has no rows. Expected column names in the first row, then records.")
        if rows:
            yield CsvChunk(path, names, rows)


def _names(row: list[str], path: str, line: int) -> list[str]:
    names = [name.strip() for name in row]
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice or not all(names):
        wrong = f"{sorted(twice)[0]!r} occurs twice" if twice else "a name is empty"
        raise DataError(f"{path}:{line}: the first row must contain the column names, but {wrong}.")
    return names
