"""What tokenized data was made of, so that a run that goes on knows whether it still is the same.

Files are told by what they hold: a run folder may be taken up on another machine, where paths and times differ.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus.config.schema import RunConfig
from isthmus.errors import DataError
from isthmus.hf.tokenizer import Tokenizer

# Where the files lie is no matter, and packing and padding happen after tokenizing.
_NO_MATTER = ("files", "valid_files", "packing", "length_buckets")


@dataclass(frozen=True, slots=True)
class Origin:
    """The record that lies beside tokenized data."""

    record: dict[str, Any]
    unchanged: bool
    """Whether it says the same as the earlier one that was given."""

    @classmethod
    def of(cls, config: RunConfig, tokenizer: Tokenizer, earlier: dict[str, Any]) -> Origin:
        """The origin of the data that ``config`` asks for.

        Args:
            config: names the files.
            tokenizer: its vocabulary and chat template.
            earlier: the record of before; where path, size and time of a file are the same, it is not read again.
        """
        known = {json.dumps(file["stat"]): file["digest"] for file in earlier.get("files", [])}
        files = [_file(Path(name), known) for name in (*config.data.files, *config.data.valid_files)]
        settings = config.data.model_dump(mode="json")
        record = {
            "files": files,
            "held_out_files": len(config.data.valid_files),
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


def _file(path: Path, known: dict[str, str]) -> dict[str, Any]:
    if not path.is_file():
        return {"stat": [str(path)], "digest": ""}  # whoever reads it says what is wrong
    stat = path.stat()
    seen = [str(path.resolve()), stat.st_size, stat.st_mtime_ns]
    digest = known.get(json.dumps(seen))
    if digest is None:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    return {"stat": seen, "digest": digest}
