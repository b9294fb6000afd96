"""A child process that checks one answer after another, each within a limit of time and memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from isthmus.errors import UsageError

LIMIT_S = 10
"""Time limit of an answer."""
_WORKER = Path(__file__).with_name("answer_worker.py")


class LimitedProcess:
    """Started for the first answer, and again after one that ended it."""

    def __init__(self, check: str, hint: str) -> None:
        """``check`` is a name in ``answer_worker.py``; ``hint`` says what to do if the process does not start."""
        self._check, self._hint = check, hint
        self._process: subprocess.Popen[str] | None = None

    def reply(self, *texts: str) -> bool | str | None:
        """The result of the check, ``failed`` if it took too much time or memory.

        Raises UsageError if the process does not start.
        """
        line = self._line(self._started(), json.dumps(texts))
        if not line:
            self.close()
            return "failed"
        result: bool | None = json.loads(line)
        return result

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, str(_WORKER), self._check, str(LIMIT_S)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            if not self._line(self._process):
                self.close()
                raise UsageError(f"rollout.reward {self._check}: its process does not start. {self._hint}")
        return self._process

    def _line(self, process: subprocess.Popen[str], line: str | None = None) -> str:
        """The next line of the process, to ``line`` if it is not None; empty if the process has ended."""
        assert process.stdin is not None and process.stdout is not None
        try:
            if line is not None:
                print(line, file=process.stdin, flush=True)
        except BrokenPipeError:
            return ""
        return process.stdout.readline()

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None
