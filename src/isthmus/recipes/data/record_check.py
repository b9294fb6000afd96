"""The first records of data files, parsed before a model, a tokenizer or torch is loaded."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice

from isthmus.data.chat.chat_records import Kind, parse_document
from isthmus.data.readers.data_names import is_hub_name
from isthmus.data.readers.file_formats import TextFileChunk, check_columns, chunk_records, read_chunks
from isthmus.data.readers.file_sources import find_sources
from isthmus.data.store.indexed_dataset import find_prefix
from isthmus.data.tokenize.record_kinds import RECORD_KINDS

_FIRST_RECORDS, _MOST_FILES = 8, 16


def check_records(sources: Iterable[Sequence[str]], kind: Kind, columns: Mapping[str, str]) -> None:
    """Parse the first records of the files of each data set; prepared files and data sets of Arrow are not opened.

    Raises:
        MissingInput, UsageError, DataError: as for the whole files.
    """
    check_columns(columns)
    records = RECORD_KINDS[kind]
    parse = records.parse or parse_document
    for names in sources:
        if any(map(_is_prepared, names)):
            continue
        files = [name for name in find_sources(names).names if not is_hub_name(name) and not os.path.isdir(name)]
        for chunk in (chunk for name in files[:_MOST_FILES] for chunk in islice(read_chunks([name]), 1)):
            if isinstance(chunk, TextFileChunk):  # its only record is the whole file
                continue
            for record in islice(chunk_records(chunk, columns=columns), _FIRST_RECORDS):
                records.check(record)
                parse(record)


def _is_prepared(name: str) -> bool:
    """Whether the name may be of indexed files, which have no records."""
    if find_prefix(name) is not None:
        return True
    if os.path.isdir(name):
        return any(file.endswith(".idx") for _, _, files in os.walk(name) for file in files)
    return any(match.endswith((".idx", ".bin")) for match in glob.iglob(name, recursive=True))
