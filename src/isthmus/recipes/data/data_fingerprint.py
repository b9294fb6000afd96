"""What tokenized data was made of, so that a run that goes on knows whether it still is the same.

Files are told by what they hold: a run folder may be taken up on another machine, where paths and times differ.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.config.schema import RunConfig
from isthmus.data.readers.file_sources import find_sources
from isthmus.data.readers.hf_datasets import HUB
from isthmus.data.store.manifest import SUFFIXES, indexed_file
from isthmus.errors import DataError
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.recipes.data.data_sources import DataSource

# Where the files lie is no matter, and what is held out, mixed, packed and padded is so after tokenizing.
_NO_MATTER = {"files", "sets", "valid_files", "test_files", "valid_fraction", "test_fraction", "seed"}
_NO_MATTER |= {"packing", "length_buckets"}
_FORMAT = 2
"""Of what the run folder holds."""


@dataclass(frozen=True, slots=True)
class DataFingerprint:
    """The record that lies beside tokenized data."""

    record: dict[str, Any]
    unchanged: bool
    """Whether it says the same as the earlier one that was given."""

    @classmethod
    def of(
        cls, config: RunConfig, parts: Sequence[DataSource], tokenizer: Tokenizer, earlier: dict[str, Any]
    ) -> DataFingerprint:
        """The origin of the data that ``config`` asks for.

        Args:
            config: says what is done with the files.
            parts: the files.
            tokenizer: its vocabulary and chat template.
            earlier: the record of before; where path, size and time of a file are the same, it is not read again.
        """
        known = {json.dumps(file["stat"]): file["digest"] for file in earlier.get("files", [])}
        files = [[file_record(name, known) for name in _files_of(part)] for part in parts]
        settings = config.data.model_dump(mode="json")
        record = {
            "format": _FORMAT,
            "parts": [[part.use, len(one), part.prepared] for part, one in zip(parts, files, strict=True)],
            "files": [file for one in files for file in one],
            "tokenizer": tokenizer_record(tokenizer),
            "recipe": config.recipe,
            "settings": {name: settings[name] for name in sorted(settings) if name not in _NO_MATTER},
        }
        return cls(record, unchanged=_content(record) == _content(earlier))


def tokenizer_record(tokenizer: Tokenizer) -> dict[str, str]:
    """Hashes that tell tokenizers apart: of the vocabulary with what begins and ends a text, and of the template."""
    parts = {
        "vocabulary": [tokenizer.inner.get_vocab(), tokenizer.bos_id, tokenizer.eos_id],
        "template": tokenizer.chat_template,
    }
    return {
        name: hashlib.blake2b(json.dumps(part, sort_keys=True).encode(), digest_size=16).hexdigest()
        for name, part in parts.items()
    }


def read_fingerprint(path: Path) -> dict[str, Any]:
    """The record at ``path``, empty when there is none.

    Raises:
        DataError: it is not one.
    """
    if not path.is_file():
        return {}
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        _content(record)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} cannot be read. Remove the folder {path.parent}; it is made anew.") from error
    return dict(record)


def _content(record: dict[str, Any]) -> dict[str, Any]:
    return record | {"files": [file["digest"] for file in record.get("files", [])]}


def _files_of(part: DataSource) -> Iterator[str]:
    """The files that a part stands for; a data set of the Hub remains a name.

    Of a pair it is the manifest, which tells of the others, so that they need not be read; all, where there is none.
    """
    for source in part.files if part.prepared else find_sources(part.files).names:
        if part.prepared:
            alone = indexed_file(source, ".json")
            every = [alone] if alone.is_file() else [indexed_file(source, suffix) for suffix in SUFFIXES]
            yield from (str(path) for path in every if path.is_file())
        else:
            yield from files_below(source)


def files_below(name: str) -> list[str]:
    """The files of a folder, which is a data set; a file itself, or the name of a data set that is elsewhere."""
    return sorted(str(path) for path in Path(name).rglob("*") if path.is_file()) if os.path.isdir(name) else [name]


def file_record(name: str, known: dict[str, str]) -> dict[str, Any]:
    """What tells a file: its path, size and time, and a digest, which is not made again where ``known`` has those."""
    if name.startswith(HUB):
        return {"stat": [name], "digest": name}  # a run that goes on needs no network, and takes what it once fetched
    path = Path(name)
    stat = path.stat()
    seen = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    digest = known.get(json.dumps(seen))
    if digest is None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return {"stat": seen, "digest": digest}
