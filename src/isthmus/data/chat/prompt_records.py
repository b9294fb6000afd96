"""Records of prompts to answer: ``prompt``, a text, or ``messages`` that end with the user's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.data.chat.message_normalization import Message, turns
from isthmus.data.readers.chunks import Record
from isthmus.data.readers.file_formats import chunk_records, read_chunks
from isthmus.errors import DataError

ANSWER = "answer"
"""The field of the answer."""
_LONGEST = 100


@dataclass(frozen=True, slots=True)
class Prompt:
    record: dict[str, Any]
    where: str
    """``file:line``."""
    content: str | list[Message]


def read_prompts(path: Path) -> Iterator[Prompt]:
    """The prompts of a data file.

    Raises:
        MissingInput: the file does not exist.
        DataError: a record has no prompt, or has an answer already.
    """
    for chunk in read_chunks([path]):
        yield from map(_prompt, chunk_records(chunk))


def _prompt(record: Record) -> Prompt:
    value, where = record.value, record.where
    if ANSWER in value:
        raise DataError(f"{where}: has a field {ANSWER} already, which is for the answer. Rename it.")
    content = value.get("messages", value.get("prompt"))
    if not content or not isinstance(content, str | list):
        raise DataError(f"{where}: expected an object with prompt or messages, got {value!r:.{_LONGEST}}.")
    if isinstance(content, str):
        return Prompt(value, where, content)
    messages = turns(content, where)
    if messages[-1]["role"] not in ("user", "tool"):
        raise DataError(f"{where}: the last message is of the {messages[-1]['role']}. End with the user's.")
    return Prompt(value, where, messages)
