"""Runs conversions in forked processes and sends each a signal at a given point.

Reads a JSON list of requests from stdin and prints the list of exit codes, -N for signal N. A point is one of

- ``first``, ``middle``, ``last``: after this chunk is written,
- ``publish``: before the rename,
- ``renamed``: after the rename,
- a number: seconds after the start.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import isthmus.cli.process  # noqa: F401
from isthmus.cli.main import main
from isthmus.convert import canonical, transfer
from isthmus.files import atomic_write
from isthmus.hf import staged_folder

canonical.CHUNK_BYTES = 2048  # tiny tensors then have several chunks
_REACHED = {
    "first": lambda done, total: True,
    "middle": lambda done, total: 2 * done >= total,
    "last": lambda done, total: done == total,
}


def run(args: list[str], number: int, point: Any) -> int:
    """Run the command in this process; it sends itself the signal at the point."""
    stream, sync = transfer.stream, atomic_write.sync

    def kill(*_: Any) -> None:
        os.kill(os.getpid(), number)

    def stream_and_kill(tensors: Any, move: Any, total_bytes: int, _progress: Any) -> None:
        stream(tensors, move, total_bytes, lambda done, total: kill() if _REACHED[point](done, total) else None)

    def sync_and_kill(path: Any) -> None:
        if path == Path(args[2]).parent:
            kill()
        sync(path)

    if point in _REACHED:
        transfer.stream = stream_and_kill
    elif point == "publish":
        staged_folder.StagedFolder.publish = kill  # type: ignore[method-assign]
    elif point == "renamed":
        atomic_write.sync = sync_and_kill
    return main(args)


def outcome(request: dict[str, Any]) -> int:
    """Run a request in a forked process and return its exit code; the parent sends signals that are due at a time."""
    child = os.fork()
    if not child:
        code = 255
        try:
            os.dup2(os.open(os.devnull, os.O_RDWR), 2)
            os.dup2(2, 1)
            code = run(request["args"], request["signal"], request["point"])
        finally:
            os._exit(code)
    if isinstance(request["point"], float):
        time.sleep(request["point"])
        os.kill(child, request["signal"])  # not reaped yet: the pid is still valid
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    print(json.dumps([outcome(request) for request in json.load(sys.stdin)]))
