"""Cuts JSON Lines and JSON arrays into chunks; no file is loaded as a whole."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

from isthmus.data.readers.chunks import CHUNK_BYTES, RECORD_BYTES, Record, read_line, too_large
from isthmus.data.readers.decompress import open_decompressed
from isthmus.errors import DataError
from isthmus.files.input_files import parse_json

_BOM = b"\xef\xbb\xbf"
_BLANKS = " \t\r\n"
_WRAPPED = re.compile(rb'\s*{\s*"data"\s*:\s*\[\s*{')
_TURN = re.compile(rb'\s*{\s*"data"\s*:\s*\[\s*{\s*"(role|from)"')
_LONGEST_TOKEN = 16  # of JSON besides strings and numbers: -Infinity, or an escaped surrogate pair


@dataclass(frozen=True, slots=True)
class JsonLinesChunk:
    """Complete lines, one JSON object each; blank lines are ignored."""

    path: str
    first: int
    raw: bytes

    def parse(self) -> Iterator[Record | DataError]:
        for number, raw in enumerate(self.raw.split(b"\n"), start=self.first):
            if number == 1:
                raw = raw.removeprefix(_BOM)
            if raw.strip():
                yield _parsed(raw, self.path, number)


@dataclass(frozen=True, slots=True)
class JsonArrayChunk:
    """Elements of an array as valid JSON, with their line numbers."""

    path: str
    texts: list[tuple[int, str]]

    def parse(self) -> Iterator[Record | DataError]:
        return (_parsed(text, self.path, line) for line, text in self.texts)


def line_chunks(path: str) -> Iterator[JsonLinesChunk | JsonArrayChunk]:
    """The objects of a file with one per line, or with one object on several lines."""
    single = _single_object(path)
    if single is not None:
        yield single
        return
    with open_decompressed(path) as file:
        line = 1
        while raw := file.read(CHUNK_BYTES):
            raw += read_line(file, path, line + raw.count(b"\n"))
            yield JsonLinesChunk(path, line, raw)
            line += raw.count(b"\n")


def _single_object(path: str) -> JsonArrayChunk | None:
    """The object of a file if it is a single one on several lines."""
    with open_decompressed(path) as file:
        raw, line = read_line(file, path, 1).removeprefix(_BOM), 1
        while not raw.strip():
            line += 1
            raw = read_line(file, path, line)
        try:
            json.loads(raw)
        except (ValueError, RecursionError):
            raw += file.read(RECORD_BYTES)
            try:
                return JsonArrayChunk(path, [(line, raw.decode())]) if isinstance(json.loads(raw), dict) else None
            except (ValueError, RecursionError):
                return None
    return None


def wraps_records(path: str) -> bool:
    """Whether the file is one object that begins with ``{"data": [{``, whose records are the elements."""
    with open_decompressed(path) as file:
        start = file.read(4096).removeprefix(_BOM)
        if _WRAPPED.match(start) is None or _TURN.match(start) is not None:
            return False
    with open_decompressed(path) as file:
        line, number = read_line(file, path, 1).removeprefix(_BOM), 1
        while not line.strip():
            number += 1
            line = read_line(file, path, number)
        try:
            json.loads(line)
        except (ValueError, RecursionError):
            return True
        return not file.read(4096).strip()  # else JSON Lines


def array_chunks(path: str, *, wrapped: bool = False) -> Iterator[JsonArrayChunk]:
    """The elements of one JSON array; a syntax error ends the file, since the next element cannot be found.

    ``wrapped``: the array is in an object (:func:`wraps_records`), whose other keys are ignored.
    """
    with open_decompressed(path) as file:
        text = _TextWindow(path, file)
        text.skip_blanks()
        text.position += 1
        if wrapped:
            text.skip_to("[")
        if text.skip_blanks() == "]":
            raise DataError(f"{path}: the JSON array is empty. Expected at least one record.")
        texts: list[tuple[int, str]] = []
        size = 0
        while True:
            line, element = text.line(), text.element()
            texts.append((line, element))
            size += len(element)
            if size >= CHUNK_BYTES:
                yield JsonArrayChunk(path, texts)
                texts, size = [], 0
            separator = text.skip_blanks()
            if separator not in ("]", ","):
                got = f"got {separator!r}" if separator else "the file ends"
                raise DataError(
                    f"{path}:{text.line()}: not JSON: expected ',' or ']' after a record, {got}. Is the file truncated?"
                )
            text.position += 1
            if separator == "]":
                break
            text.skip_blanks()
        if wrapped:
            if text.skip_blanks() not in ("}", ","):
                raise DataError(
                    f"{path}:{text.line()}: not JSON: expected '}}' after the array. Is the file truncated?"
                )
        elif text.skip_blanks():
            raise DataError(f"{path}:{text.line()}: not JSON: more text after the end of the array.")
        if texts:
            yield JsonArrayChunk(path, texts)


class _TextWindow:
    """The text of a file from the current element on."""

    def __init__(self, path: str, file: BinaryIO) -> None:
        self.position = 0
        self._path, self._file = path, file
        self._window, self._ended = "", False
        self._line, self._counted = 1, 0
        self._before = 0  # characters before the window in the line that it begins in
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._decoded_lines, self._decoded_bytes = 1, 0  # number of the last decoded line, and its bytes so far
        self._json = json.JSONDecoder()
        self._grow()
        self._window = self._window.removeprefix("\ufeff")

    def line(self) -> int:
        self._line += self._window.count("\n", self._counted, self.position)
        self._counted = self.position
        return self._line

    def skip_blanks(self) -> str:
        """Returns the next character, empty at the end."""
        while True:
            while self.position < len(self._window) and self._window[self.position] in _BLANKS:
                self.position += 1
            if self.position < len(self._window):
                return self._window[self.position]
            if self._ended:
                return ""
            self._grow()

    def skip_to(self, character: str) -> None:
        """Skip the text up to and with a character that is in the window."""
        self.position = self._window.index(character, self.position) + 1

    def element(self) -> str:
        """Skip one JSON value; returns its text."""
        while True:
            try:
                end = self._json.raw_decode(self._window, self.position)[1]
            except json.JSONDecodeError as error:
                near_end = error.pos >= len(self._window) - _LONGEST_TOKEN or error.msg.startswith("Unterminated")
                if self._ended or not near_end:
                    start = self._window.rfind("\n", 0, error.pos) + 1
                    column = error.pos - start + 1 + (0 if start else self._before)
                    line = self.line() + self._window.count("\n", self.position, error.pos)
                    raise DataError(f"{self._path}:{line}: not JSON: {error.msg} (column {column}).") from error
            except (ValueError, RecursionError) as error:
                raise DataError(f"{self._path}:{self.line()}: not JSON: {_reason(error)}.") from error
            else:
                if end < len(self._window) or self._ended:  # else a number may continue
                    element, self.position = self._window[self.position : end], end
                    return element
            self._grow()

    def _grow(self) -> None:
        """Drop the text before the position and read as much as remains, so that long elements take few attempts."""
        if len(self._window) - self.position > RECORD_BYTES:
            raise too_large(f"{self._path}:{self.line()}")
        self.line()
        newline = self._window.rfind("\n", 0, self.position)
        self._before = self.position - newline - 1 if newline >= 0 else self._before + self.position
        self._window = self._window[self.position :]
        self.position = self._counted = 0
        raw = self._file.read(max(CHUNK_BYTES, len(self._window)))
        self._ended = not raw
        try:
            piece = self._decoder.decode(raw, final=self._ended)
        except UnicodeDecodeError as error:
            shift = self._decoded_bytes
            raise _not_utf8(error, self._path, self._decoded_lines, shift) from error
        self._window += piece
        self._decoded_lines += piece.count("\n")
        last = piece.rpartition("\n")
        self._decoded_bytes = len(last[2].encode()) + (0 if last[1] else self._decoded_bytes)


def decode_utf8(raw: bytes, path: str, line: int) -> str:
    """Decode bytes that begin on ``line``; DataError with line and column if they are not UTF-8."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise _not_utf8(error, path, line, 0) from error


def _not_utf8(error: UnicodeDecodeError, path: str, line: int, shift: int) -> DataError:
    raw = error.object
    line += raw.count(b"\n", 0, error.start)
    newline = raw.rfind(b"\n", 0, error.start)
    column = error.start - newline if newline >= 0 else shift + error.start + 1
    return DataError(f"{path}:{line}: not UTF-8: byte 0x{raw[error.start]:02x} at byte column {column}.")


def _reason(error: ValueError | RecursionError) -> str:
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} (column {error.colno})"
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)  # an integer of over 4300 digits


def _parsed(raw: bytes | str, path: str, line: int) -> Record | DataError:
    try:
        value = parse_json(decode_utf8(raw, path, line) if isinstance(raw, bytes) else raw)
    except DataError as error:
        return error
    except ValueError as error:
        return DataError(f"{path}:{line}: not JSON: {_reason(error)}.")
    if not isinstance(value, dict):
        return DataError(f"{path}:{line}: a record must be a JSON object, got {type(value).__name__}.")
    return Record(value, f"{path}:{line}")
