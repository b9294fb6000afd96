"""The reward ``math_verify``: whether an answer equals the right one by mathematics, with the library math-verify."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

from isthmus.errors import UsageError
from isthmus.recipes.rollout.answer_batch import AnswerBatch
from isthmus.recipes.rollout.right_answers import RightAnswers, result_of, without_reasoning

_WORKER = Path(__file__).with_name("math_worker.py")


class MathVerify:
    """``math_verify``: 1 if the answer equals the right one, else 0; None without a right answer that can be parsed.

    An answer may take forever or all memory (``9^9^9^9``), and math-verify's own time limits need signals of the main
    thread. So a child process verifies; an answer that takes more than ``LIMIT_S``, or ends the process, is wrong and
    counted in the metric ``math_verify_failures``.
    """

    LIMIT_S = 10

    def __init__(self, setting: str) -> None:
        """Raises UsageError if the library is not installed."""
        self.setting = setting
        self._right = RightAnswers(setting)
        if importlib.util.find_spec("math_verify") is None:
            raise UsageError(
                "rollout.reward math_verify needs the library math-verify: pip install 'isthmus[rl]', or leave "
                "math_verify out."
            )
        self._process: subprocess.Popen[str] | None = None

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise DataError if no record has a right answer."""
        self._right.check_columns(columns)

    def __call__(self, batch: AnswerBatch) -> list[float | None]:
        """Verify each answer in the child process, which is started for the first one."""
        failures, rewards = 0, list[float | None]()
        known: dict[tuple[str, str], bool | str | None] = {}
        for text, right in zip(batch.texts, self._right.of(batch), strict=True):
            answer, replies = result_of(without_reasoning(text)), []
            for expected in right:
                if (expected, answer) not in known:  # the answers of a group are often the same
                    known[expected, answer] = self._verified(expected, answer)
                replies.append(known[expected, answer])
            failures += "failed" in replies
            rewards.append(None if all(reply is None for reply in replies) else float(True in replies))
        batch.logged_metrics["math_verify_failures"] = float(failures)
        return rewards

    def _verified(self, right: str, answer: str) -> bool | str | None:
        """The reply of the child process, ``failed`` if there is none."""
        reply = _reply(self._started(), json.dumps([right, answer]))
        if not reply:
            self.close()
            return "failed"
        result: bool | None = json.loads(reply)
        return result

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None or self._process.poll() is not None:
            self._process = subprocess.Popen(
                [sys.executable, str(_WORKER), str(self.LIMIT_S)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            if not _reply(self._process):
                self.close()
                raise UsageError(
                    "rollout.reward math_verify: the process with math-verify does not start. Correct the "
                    "installation: python -c 'import math_verify'"
                )
        return self._process

    def close(self) -> None:
        """End the child process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _reply(process: subprocess.Popen[str], line: str | None = None) -> str:
    """The next line of the child process, to ``line`` if it is not None; empty if the process has ended."""
    assert process.stdin is not None and process.stdout is not None
    try:
        if line is not None:
            print(line, file=process.stdin, flush=True)
    except BrokenPipeError:
        return ""
    return process.stdout.readline()
