"""Compiles failing_calls.c, once per version of the source."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("failing_calls.c")


@functools.cache
def library() -> Path | None:
    """The shared library for LD_PRELOAD; None where it cannot be built: without a C compiler, or not on Linux."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None or sys.platform != "linux":
        return None
    folder = Path(tempfile.gettempdir()) / f"isthmus-failing-calls-{os.getuid()}"
    built = folder / f"{hashlib.sha256(SOURCE.read_bytes()).hexdigest()[:16]}.so"
    if not built.is_file():
        folder.mkdir(mode=0o700, exist_ok=True)
        unfinished = folder / f"{os.getpid()}.so"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-o", str(unfinished), str(SOURCE), "-ldl"],
            check=True, capture_output=True,
        )  # fmt: skip
        unfinished.replace(built)  # another test process may build it too
    return built


def fault(
    below: Path, *, n: int, calls: str = "all", error: int = 0, mode: str = "once", log: Path | None = None
) -> dict[str, str]:
    """Environment variables: the ``n``-th of ``calls`` below a folder fails; see failing_calls.c."""
    more = {} if log is None else {"FAILING_CALLS_LOG": str(log)}
    return {"FAILING_CALLS": f"{below}|{calls}|{n}|{error}|{mode}"} | more


def arm() -> None:
    """Read the variables again in this process, which was forked after the library was loaded."""
    ctypes.CDLL(None).failing_calls_arm()
