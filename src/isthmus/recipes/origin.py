"""What tokenized data was made of, so that a run that goes on knows whether it still is the same.

Files are told by what they hold: a run folder may be taken up on another machine, where paths and times differ.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.config.schema import RunConfig
from isthmus.data.manifest import SUFFIXES, pair_file
from isthmus.data.sources import find_sources
from isthmus.errors import DataError
from isthmus.hf.tokenizer import Tokenizer
from isthmus.recipes.parts import Part

# Where the files lie is no matter, and what is held out, mixed, packed and padded is so after tokenizing.
_NO_MATTER = {"files", "sets", "valid_files", "test_files", "valid_fraction", "test_fraction", "seed"}
_NO_MATTER |= {"packing", "length_buckets"}
_FORMAT = 2
"""Of what the run folder holds."""


@dataclass(frozen=True, slots=True)
class Origin:
    """The record that lies beside tokenized data."""

    record: dict[str, Any]
    unchanged: bool
    """Whether it says the same as the earlier one that was given."""

    @classmethod
    def of(cls, config: RunConfig, parts: Sequence[Part], tokenizer: Tokenizer, earlier: dict[str, Any]) -> Origin:
        """The origin of the data that ``config`` asks for.

        Args:
            config: says what is done with the files.
            parts: the files.
            tokenizer: its vocabulary and chat template.
            earlier: the record of before; where path, size and time of a file are the same, it is not read again.
        """
        known = {json.dumps(file["stat"]): file["digest"] for file in earlier.get("files", [])}
        settings = config.data.model_dump(mode="json")
        record = {
            "format": _FORMAT,
            "parts": [[part.use, len(part.files), part.prepared] for part in parts],
            "files": [file for part in parts for file in _files(part, known)],
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


def read_origin(path: Path) -> dict[str, Any]:
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


def _files(part: Part, known: dict[str, str]) -> list[dict[str, Any]]:
    """Every file of a part; a pair is told by its manifest, where it has one, so that its tokens are not read."""
    if part.prepared:
        files = [
            [f"{prefix}.json"] if pair_file(prefix, ".json").is_file() else [f"{prefix}{s}" for s in SUFFIXES]
            for prefix in part.files
        ]
    else:
        files = [files_below(name) for name in find_sources(part.files).names]
    return [file_record(Path(path), known) for paths in files for path in paths]


def files_below(name: str) -> list[str]:
    """The files of a folder, which is a data set; a file itself, or the name of a data set that is elsewhere."""
    return sorted(str(path) for path in Path(name).rglob("*") if path.is_file()) if os.path.isdir(name) else [name]


def file_record(path: Path, known: dict[str, str]) -> dict[str, Any]:
    """What tells a file: its path, size and time, and a digest, which is not made again where ``known`` has those."""
    if not path.is_file():  # a data set of the Hub, whose name stands for it; or the mask that a pair has not
        return {"stat": [str(path)], "digest": path.name}
    stat = path.stat()
    seen = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    digest = known.get(json.dumps(seen))
    if digest is None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return {"stat": seen, "digest": digest}
