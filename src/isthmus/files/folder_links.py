"""Symbolic links in a folder of somebody else: a link to a file outside may name a secret of the user."""

from __future__ import annotations

import os
from pathlib import Path

from isthmus.errors import UnsafeInput


def check_links(folder: Path) -> None:
    """Raise UnsafeInput with the name of the first link that leads out of ``folder``, in subfolders too.

    The folder may be a link itself. A snapshot in a cache of the Hub links to the blobs of the cache.
    """
    real = folder.resolve()
    for parent, folders, files in os.walk(real):
        folders[:] = [name for name in folders if not name.startswith(".")]  # nothing reads .git and .venv
        for name in sorted([*folders, *files]):
            path = Path(parent, name)
            if path.is_symlink() and not is_within(real, Path(os.path.realpath(path))):  # a loop of links is outside
                raise UnsafeInput(
                    f"{folder / path.relative_to(real)} is a link to {os.readlink(path)}, a file outside the folder. "
                    "If you trust it, replace the link with the file."
                )


def is_within(folder: Path, file: Path) -> bool:
    """Whether a resolved path is in the folder or, in a Hub cache with links, among its blobs."""
    real = folder.resolve()
    snapshot = next((path for path in (real, *real.parents) if path.parent.name == "snapshots"), None)
    return file.is_relative_to(real) or (snapshot is not None and file.parent == snapshot.parents[1] / "blobs")
