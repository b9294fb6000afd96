"""The command line in a process that the user, torchrun or Slurm started: it prints its own errors."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from isthmus.cli import here
from isthmus.cli.ending import ending_of, keep_traceback, say

_STARTED_S = time.time()


def run_alone(argv: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Run the command line, print what went wrong and return the exit code."""
    here.argv = list(argv)
    debug = "--debug" in argv
    ending = ending_of(lambda: run(argv))
    if ending.exit_code == 0:
        return 0
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if world_size in ("", "0", "1"):
        say(keep_traceback(ending, here.run_folder), debug=debug)
        return ending.exit_code
    if debug or _speaks_first():
        say(keep_traceback(ending, here.run_folder), debug=debug, prefix=f"rank {rank}: ")
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(ending.exit_code)  # the interpreter may wait for threads that wait for a peer that is gone


def _speaks_first() -> bool:
    """Whether no other rank of this run has failed on this machine before; told by a file, as nothing else is sure.

    Ranks have their parent in common: the launcher, which is another process in every run. If it is a shell that
    outlives the run, the file is older than this process.
    """
    folder, name = Path(tempfile.gettempdir()), "isthmus-failed-"
    for left in folder.glob(f"{name}*"):
        with suppress(OSError, ValueError):
            if not Path("/proc", str(int(left.name.removeprefix(name)))).exists():
                left.unlink()
    marker = folder / f"{name}{os.getppid()}"
    try:
        if marker.exists() and marker.stat().st_mtime < _STARTED_S - 1.0:
            marker.unlink()
        marker.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        pass  # better twice than never
    return True
