"""Runs commands one after the other, each in a forked process that a signal ends at a chosen point of a conversion.

Reads a JSON list of requests from stdin and prints a list of what became of them: exit codes, -N for signal N. A point
is ``first``, ``middle`` or ``last`` (the chunk that was just written), ``publish`` (all is written), ``renamed`` (the
folder has its name, nothing was done after that), or a number: seconds after the start.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import isthmus.cli.process  # noqa: F401
from isthmus import atomic_write
from isthmus.cli.main import main
from isthmus.convert import canonical, transfer
from isthmus.hf import staged_folder

canonical.CHUNK_BYTES = 2048  # so that tiny tensors have several chunks
_REACHED = {
    "first": lambda done, total: True,
    "middle": lambda done, total: 2 * done >= total,
    "last": lambda done, total: done == total,
}


def run(words: list[str], number: int, point: Any) -> int:
    """Be the command; with a signal to itself at the point."""
    stream, sync = transfer.stream, atomic_write.sync

    def end(*_: Any) -> None:
        os.kill(os.getpid(), number)

    def ended_stream(tensors: Any, move: Any, total_bytes: int, _progress: Any) -> None:
        stream(tensors, move, total_bytes, lambda done, total: end() if _REACHED[point](done, total) else None)

    def ended_sync(path: Any) -> None:
        if path == Path(words[2]).parent:
            end()
        sync(path)

    if point in _REACHED:
        transfer.stream = ended_stream
    elif point == "publish":
        staged_folder.StagedFolder.publish = end  # type: ignore[method-assign]
    elif point == "renamed":
        atomic_write.sync = ended_sync
    return main(words)


def outcome(request: dict[str, Any]) -> int:
    """Fork, wait, and where the point is a moment send the signal then."""
    child = os.fork()
    if not child:
        code = 255
        try:
            os.dup2(os.open(os.devnull, os.O_RDWR), 2)
            os.dup2(2, 1)
            code = run(request["words"], request["signal"], request["point"])
        finally:
            os._exit(code)
    if isinstance(request["point"], float):
        time.sleep(request["point"])
        os.kill(child, request["signal"])  # it is ours to wait for, so that this is it or its remains
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    print(json.dumps([outcome(request) for request in json.load(sys.stdin)]))
