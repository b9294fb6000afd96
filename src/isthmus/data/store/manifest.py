"""The manifest ``PREFIX.json`` of indexed files, which detects changed or truncated files.

``pair`` has the counts, and the sizes and hashes of the files; the other keys belong to the writer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from isthmus.errors import DataError, MissingInput
from isthmus.files.atomic_write import write_atomic
from isthmus.files.checked_files import ListedFile, is_trusting
from isthmus.files.file_checksums import Blocks, FileChecksums, content_checksum, hash_file

MASK, VALUES, COLUMNS = ".mask.bin", ".values.bin", ".columns.jsonl"
SUFFIXES = (".bin", ".idx", MASK, VALUES, COLUMNS)
"""Suffixes of the indexed files; mask, values and columns are optional."""
HINT = "Was it truncated or changed? Copy it again, or prepare it again."
BLOCK_BYTES = 1 << 18
"""Block size of the checksums: a sample needs at least one block, and has few KiB."""
_CHUNK = 1 << 24


def indexed_file(prefix: Path | str, suffix: str) -> Path:
    """A prefix may contain dots."""
    return Path(f"{prefix}{suffix}")


def read_manifest(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_bytes())
        expected = record.pop("checksum", None)  # manifests of earlier versions have none
        sound = is_trusting() or expected in (None, content_checksum(record))
        sound = sound and all(
            isinstance(file["bytes"], int) and isinstance(file["xxh3_128"], str) and suffix in SUFFIXES
            for suffix, file in record["pair"]["files"].items()
        )
        sound = sound and {".bin", ".idx"} <= set(record["pair"]["files"])
        sound = sound and isinstance(record["pair"]["max_token_id"], int) and isinstance(record.get("kind", ""), str)
        parts = [record.get(name, {}) for name in ("tokenizer", "settings")]
        sound = sound and all(isinstance(part, dict) for part in [*parts, parts[1].get("chat", {})])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        sound = False
    if not sound:
        raise DataError(f"{path}: not a manifest of indexed files. {HINT} If it is another file, move it elsewhere.")
    return dict(record)


def write_manifest(prefix: Path | str, record: dict[str, Any]) -> None:
    """Write ``PREFIX.json`` atomically.

    ``record`` has ``pair`` (from ``IndexedWriter.close``), ``kind`` (text, chat, preference, unpaired or prompt),
    ``tokenizer`` (``tokenizer_record``), ``seq_length`` (limit of samples, None for documents), and keys of the caller.
    The manifest also has a checksum of its own content.
    """
    content = {**record, "checksum": content_checksum(record)}
    write_atomic(indexed_file(prefix, ".json"), json.dumps(content, indent=1) + "\n")


def dataset_record(
    dtype: np.dtype[Any], *, sequences: int, documents: int, tokens: int, max_token_id: int, files: dict[str, Any]
) -> dict[str, Any]:
    """``pair`` of a manifest."""
    counts = {"sequences": sequences, "documents": documents, "tokens": tokens, "max_token_id": max_token_id}
    return {"format": 1, "dtype": dtype.name, **counts, "files": files}


def file_record(path: Path, xxh3_128: str | None = None, known: Blocks | None = None) -> dict[str, Any]:
    """Size and hashes of one of the files: of the whole, which identifies the data, and of blocks, for its readers.

    What is not given is computed from the file.
    """
    return {"xxh3_128": xxh3_128 or file_hash(path), **hash_file(path, BLOCK_BYTES, known).as_json()}


def listed_file(prefix: Path | str, suffix: str, record: dict[str, Any], mapped: npt.NDArray[Any]) -> ListedFile | None:
    """One of the files in a manifest with its checksums; None if it has none, or they are not checked."""
    entry = {name: value for name, value in record["pair"]["files"][suffix].items() if name != "xxh3_128"}
    if is_trusting() or "blocks" not in entry:
        return None
    path = indexed_file(prefix, suffix)
    try:
        checksums, content = FileChecksums.from_json(entry), mapped.view(np.uint8).data
        return ListedFile(path, checksums, "its manifest", HINT, content)
    except ValueError as error:
        raise DataError(f"{path}: its manifest has {error}. {HINT}") from None


def file_hash(path: Path) -> str:
    """128-bit XXH3: detects accidents, not forgeries."""
    state = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            state.update(part)
    return state.hexdigest()


def check_sizes(prefix: Path | str, record: dict[str, Any], manifest: Path) -> None:
    for suffix, file in record["pair"]["files"].items():
        path = indexed_file(prefix, suffix)
        if not path.is_file():
            raise MissingInput(f"{path}: no such file, but {manifest} lists it. Copy it too, or prepare it again.")
        if path.stat().st_size != file["bytes"]:
            raise DataError(f"{path}: {path.stat().st_size} bytes, {manifest} has {file['bytes']}. {HINT}")
