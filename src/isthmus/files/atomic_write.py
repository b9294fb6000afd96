"""Atomic file writes: a reader finds the old content or the complete new one, also after a crash or a power loss."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from isthmus.errors import disk_errors

TEMPORARY = ".tmp-"
"""Prefix of the names of temporary files and folders; after a crash they may be deleted."""


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; when the block ends, sync that file and rename it to ``path``.

    When the block raises, the temporary file is removed and ``path`` stays as it was.

    Raises:
        NoSpace: the disk or the quota is full.
        IOFailure: the file cannot be written for another reason.
    """
    temporary = path.with_name(f"{TEMPORARY}{path.name}")
    with disk_errors(path):
        try:
            yield temporary
            sync(temporary)
            rename(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write ``content`` (text as UTF-8) to ``path`` atomically; raises as :func:`atomic_file`."""
    with atomic_file(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def rename(source: Path, target: Path) -> None:
    """Rename a synced file or folder, and sync the folder that contains it."""
    source.replace(target)
    sync(target.parent)


def sync(path: Path) -> None:
    """Flush a file or a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """The folder for files that can be made again; it may not exist."""
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "isthmus"
