"""The command line in a process that the user, torchrun or Slurm started: it prints its own errors."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from isthmus.cli import process_state
from isthmus.cli.exit import ending_of, keep_traceback, say
from isthmus.launch.speaker import speaks_first


def run_alone(argv: Sequence[str], run: Callable[[Sequence[str]], int]) -> int:
    """Run the command line, print what went wrong and return the exit code."""
    process_state.argv = list(argv)
    debug = "--debug" in argv
    ending = ending_of(lambda: run(argv))
    if ending.exit_code == 0:
        return 0
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if world_size in ("", "0", "1"):
        say(keep_traceback(ending, process_state.run_folder), debug=debug)
        return ending.exit_code
    if debug or speaks_first():
        say(keep_traceback(ending, process_state.run_folder), debug=debug, prefix=f"rank {rank}: ")
    with suppress(OSError):
        sys.stdout.flush()
    os._exit(ending.exit_code)  # the interpreter may wait for threads that wait for a peer that is gone
