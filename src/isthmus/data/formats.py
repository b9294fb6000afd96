"""Files to records, in two steps: chunks, which are cheap to come by, and the records in them, which cost more.

The content decides how a file is read, not its name; only where content cannot tell does the name: ``.txt``.
A plain text file is one document as it stands: nothing in it says where another would begin.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from isthmus.data.chunks import Chunk as Chunk
from isthmus.data.chunks import OnError as OnError
from isthmus.data.chunks import Record as Record
from isthmus.data.chunks import Skipped as Skipped
from isthmus.data.json_text import array_chunks, decoded, line_chunks
from isthmus.data.opened import opened, unpacked_name
from isthmus.errors import DataError, UsageError


def read_records(path: Path | str, *, on_error: OnError = "stop", skipped: Skipped | None = None) -> Iterator[Record]:
    """Yield the records of one file in their order; the errors are those of the two functions that follow."""
    for chunk in read_chunks([path]):
        yield from chunk_records(chunk, on_error=on_error, skipped=skipped)


def read_chunks(files: Sequence[Path | str]) -> Iterator[Chunk]:
    """Cut files into chunks, in their order: the same ones each time, as long as the files stay as they are.

    Memory does not grow with the size of the files.

    Raises:
        MissingInput: there is no such file.
        UsageError: a path is a folder.
        DataError: a file is empty, or broken in a way that leaves no sure place to go on from.
        IOFailure: reading failed.
    """
    for file in files:
        yield from _file_chunks(Path(file))


def chunk_records(chunk: Chunk, *, on_error: OnError = "stop", skipped: Skipped | None = None) -> Iterator[Record]:
    """Yield the records of a chunk in their order.

    Args:
        chunk: may come from another process.
        on_error: what to do at a bad record: raise what is wrong, or note it in ``skipped``.
        skipped: where bad records are noted.

    Raises:
        DataError: (``on_error="stop"``) a record is bad.
        MissingInput, IOFailure: a text file, which is read only here, cannot be.
    """
    skipped = skipped if skipped is not None else Skipped()
    for item in chunk.parse():
        if isinstance(item, DataError):
            skipped.refuse(item, on_error)
        else:
            yield item


@dataclass(frozen=True, slots=True)
class TextFile:
    """A whole text file: one document."""

    path: str

    def parse(self) -> Iterator[Record | DataError]:
        """One record with the key ``text``."""
        with opened(self.path) as file:
            text = decoded(file.read(), self.path, 1)
        if not text.strip():
            raise DataError(f"{self.path}: the file is empty. Wanted text.")
        yield Record({"text": text}, f"{self.path}:1")


def _file_chunks(path: Path) -> Iterator[Chunk]:
    if path.is_dir():
        raise UsageError(f"{path} is a folder, not a data file. Name the .json, .jsonl or .txt files in it.")
    with opened(path) as file:
        start = file.read(4096)
    if unpacked_name(path).endswith(".txt"):
        yield TextFile(str(path))
        return
    first = start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1]
    if not first:
        raise DataError(f"{path}: the file is empty. Wanted JSON records or text.")
    if first == b"[":
        yield from array_chunks(str(path))
    elif first == b"{":
        yield from line_chunks(str(path))
    else:
        raise DataError(
            f"{path}:1: not JSON: begins with {first!r}. Wanted a JSON array of objects, one JSON object a line, "
            "or plain text in a file that ends in .txt."
        )
