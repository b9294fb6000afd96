"""The machine as checks read it: files below a root, environment variables, and tools with a time limit."""

from __future__ import annotations

import ctypes
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_TOOL_SECONDS = 10.0


class ToolFailed(Exception):
    """A tool is not installed, failed, or did not answer in time; the message says which."""


class ToolTimedOut(ToolFailed):
    """It did not answer in time."""


def run_tool(command: Sequence[str], seconds: float = _TOOL_SECONDS) -> str:
    """The standard output of a command.

    Raises:
        ToolFailed: it is not installed, ends with another exit code than 0, or runs longer than ``seconds``.
    """
    name = command[0]
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            start_new_session=True,
        )
    except FileNotFoundError:
        raise ToolFailed(f"{name} is not installed") from None
    except OSError as failure:
        raise ToolFailed(f"{name} cannot be started: {failure.strerror}") from None
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # without wait: a process that waits for a dead driver does not end
        raise ToolTimedOut(f"{name} did not answer within {seconds:g} s") from None
    if process.returncode:
        said = " ".join((errors or output).split())[:300]
        raise ToolFailed(f"{name} ended with exit code {process.returncode}: {said or 'no message'}")
    return output


def process_cores() -> frozenset[int]:
    """Numbers of the logical cores that this process may use."""
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1))


def clock_state() -> int | None:
    """What the kernel says about its clock: 0 to 4 if it follows a time server, 5 if not; None if it does not tell."""
    adjtimex: Any = getattr(ctypes.CDLL(None), "adjtimex", None)
    state = int(adjtimex(ctypes.create_string_buffer(1024))) if adjtimex else -1  # zeros: it changes nothing
    return None if state < 0 else state


@dataclass(frozen=True)
class Machine:
    """Where the facts come from; tests replace each part."""

    root: Path = Path("/")
    """Parent of ``/sys``, ``/proc``, ``/dev`` and ``/etc``."""
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    folder: Path = field(default_factory=Path.cwd)
    """The working folder, for run folders."""
    user: int = field(default_factory=os.geteuid)
    groups: frozenset[int] = field(default_factory=lambda: frozenset((os.getegid(), *os.getgroups())))
    cores: frozenset[int] = field(default_factory=process_cores)
    run_tool: Callable[[Sequence[str]], str] = run_tool
    disk_usage: Callable[[Path], Any] = shutil.disk_usage
    limit: Callable[[int], tuple[int, int]] = resource.getrlimit
    clock_state: Callable[[], int | None] = clock_state

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """Text of a file without surrounding spaces; None if it does not exist or cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return None

    def values(self, name: str, separator: str = ":") -> dict[str, str]:
        """Lines such as ``MemTotal:  2048 kB`` of a file; the first of several with the same name."""
        pairs = (line.partition(separator) for line in (self.read(name) or "").splitlines())
        return {key.strip(): value.strip() for key, _, value in reversed([*pairs])}

    def names(self, folder: str) -> list[str]:
        """Sorted names in a folder; empty if it does not exist or cannot be read."""
        try:
            return sorted(entry.name for entry in self.path(folder).iterdir())
        except OSError:
            return []
