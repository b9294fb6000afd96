"""The command line in a process that the user, torchrun or Slurm started: it prints its own errors."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from isthmus.cli import here
from isthmus.cli.ending import ending_of, keep_traceback, say


def run_alone(argv: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Run the command line, print what went wrong and return the exit code."""
    here.argv = list(argv)
    debug = "--debug" in argv
    ending = ending_of(lambda: run(argv))
    if ending.exit_code == 0:
        return 0
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    ending = keep_traceback(ending, here.run_folder, int(rank) if rank.isdigit() else 0)
    if world_size in ("", "0", "1"):
        say(ending, debug=debug)
        return ending.exit_code
    if debug or _speaks_first():
        say(ending, debug=debug, prefix=f"rank {rank}: ")
    sys.stdout.flush()
    os._exit(ending.exit_code)  # the interpreter may wait for threads that wait for a peer that is gone


def _speaks_first() -> bool:
    """Whether no other rank that the same launcher started on this machine has failed before."""
    parent = os.getppid()
    try:
        started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return True
    try:
        (Path(tempfile.gettempdir()) / f"isthmus-failed-{parent}-{started}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True
