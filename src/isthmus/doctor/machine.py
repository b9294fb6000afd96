"""The machine as checks read it: files below a root, environment variables, and tools with a time limit."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

_TOOL_SECONDS = 10.0


class ToolFailed(Exception):
    """A tool is not installed, failed, or did not answer in time; the message says which."""


def run_tool(command: Sequence[str], seconds: float = _TOOL_SECONDS) -> str:
    """The standard output of a command.

    Raises:
        ToolFailed: it is not installed, ends with another exit code than 0, or runs longer than ``seconds``.
    """
    name = command[0]
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            errors="replace", env={**os.environ, "LC_ALL": "C"}, start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise ToolFailed(f"{name} is not installed") from None
    except OSError as failure:
        raise ToolFailed(f"{name} cannot be started: {failure.strerror}") from None
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()  # without wait: a process that waits for a dead driver does not end
        raise ToolFailed(f"{name} did not answer within {seconds:g} s") from None
    if process.returncode:
        said = " ".join((errors or output).split())[:300]
        raise ToolFailed(f"{name} ended with exit code {process.returncode}: {said or 'no message'}")
    return output


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
    run_tool: Callable[[Sequence[str]], str] = run_tool

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """Text of a file without surrounding spaces; None if it does not exist or cannot be read."""
        try:
            return self.path(name).read_text(errors="replace").strip()
        except OSError:
            return None

    def names(self, folder: str) -> list[str]:
        """Sorted names in a folder; empty if it does not exist or cannot be read."""
        try:
            return sorted(entry.name for entry in self.path(folder).iterdir())
        except OSError:
            return []
