"""The names of data: formats by suffix, compressions, and how the help of the commands describes them.

Imports nothing slow, since every command has its help.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

HUB = "hf:"
"""Prefix of a data set on the Hub; ``hf://`` is a URL of a file."""
_HUB_ID = re.compile(r"([A-Za-z0-9][\w.-]*)/[A-Za-z0-9][\w.-]*(:[^/\s]+)?")
FORMATS: dict[str, tuple[str, ...]] = {
    "JSON": (".json", ".jsonl", ".ndjson"),
    "parquet": (".parquet",),
    "tables": (".csv", ".tsv"),
    "text": (".txt",),
}
"""Suffixes of data files by format."""
COMPRESSED = (".gz", ".gzip", ".zst", ".zstd")
"""Suffixes of compressed files; parquet compresses its own content."""
PARTIAL = ".partial"
"""Suffix of the folder in which indexed files are prepared."""
FIELDS = tuple(
    "text messages conversations instruction input output history system tools prompt completion query response chosen "
    "rejected label kto_tag margin answer".split()
)
"""All known keys of a record."""

_INDEX_DESCRIPTION = re.compile(r"[0-9a-f]{32}-\w+(-\w+)?-description\.txt")
"""Megatron-LM describes the sample indices of a dataset in ``PREFIX/cache/GPTDataset_indices/HASH-...``, as JSON."""


def uncompressed_name(path: Path) -> str:
    """The file name without the suffix of a compression."""
    return path.stem if path.suffix in COMPRESSED else path.name


def is_hub_name(name: str) -> bool:
    """Whether a name is ``hf:`` with a data set on the Hub."""
    return name.startswith(HUB) and not name.startswith(f"{HUB}//")


def hub_name(name: str) -> str:
    """``hf:ORG/NAME`` for a bare ``ORG/NAME`` or ``ORG/NAME:SPLIT``; other names, and paths of files, are unchanged."""
    match = _HUB_ID.fullmatch(name)
    if match is None or os.path.exists(name) or os.path.isdir(match[1]):
        return name
    suffixes = tuple(suffix for group in (*FORMATS.values(), COMPRESSED) for suffix in group)
    return name if name.lower().endswith((*suffixes, ".bin", ".idx")) else f"{HUB}{name}"


def is_manifest(path: Path) -> bool:
    """Whether the file is the manifest of indexed files in the same folder."""
    return path.suffix == ".json" and path.with_suffix(".idx").is_file()


def is_index_description(path: Path) -> bool:
    """Whether the file describes sample indices that Megatron-LM has cached."""
    return _INDEX_DESCRIPTION.fullmatch(path.name) is not None


def describe_sources() -> str:
    """All names that :func:`isthmus.data.readers.file_sources.find_sources` takes, for help texts."""
    formats = "; ".join(f"{name} {' '.join(suffixes)}" for name, suffixes in FORMATS.items())
    return (
        f"files ({formats}; all but parquet also compressed: {' '.join(COMPRESSED)}), folders, patterns, URLs of them "
        "(s3://, gs://, hf://, hdfs://), datasets written by save_to_disk, or data sets of the Hub: ORG/NAME[:SPLIT] "
        f"or {HUB}ORG/NAME[/CONFIGURATION][:SPLIT]"
    )
