"""A conversion sends itself a signal at a given point:

- ``first``, ``middle``, ``last``: after this chunk is written,
- ``publish``: before the rename,
- ``renamed``: after the rename.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from isthmus.convert import canonical, transfer
from isthmus.files import atomic_write
from isthmus.hf import staged_folder

_REACHED = {
    "first": lambda done, total: True,
    "middle": lambda done, total: 2 * done >= total,
    "last": lambda done, total: done == total,
}


def arm(point: str | float, number: int, destination: Path) -> None:
    """Let conversions of this process to ``destination`` have small chunks and send signal ``number`` at the point."""
    canonical.CHUNK_BYTES = 2048  # tiny tensors then have several chunks
    stream, sync = transfer.stream, atomic_write.sync

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), number)

    def stream_and_kill(tensors: Any, move: Any, total_bytes: int, _progress: Any) -> None:
        stream(tensors, move, total_bytes, lambda done, total: kill() if _REACHED[point](done, total) else None)

    def sync_and_kill(path: Any) -> None:
        if path == destination.parent:
            kill()
        sync(path)

    if point in _REACHED:
        transfer.stream = stream_and_kill
    elif point == "publish":
        staged_folder.StagedFolder.publish = kill  # type: ignore[method-assign]
    elif point == "renamed":
        atomic_write.sync = sync_and_kill
