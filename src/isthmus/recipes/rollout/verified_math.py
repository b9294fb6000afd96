"""The reward ``math_verify``: whether an answer equals the right one by mathematics, with the library math-verify."""

from __future__ import annotations

from collections.abc import Collection

from isthmus.extras import check_installed
from isthmus.recipes.rollout.answer_batch import AnswerBatch
from isthmus.recipes.rollout.limited_process import LimitedProcess
from isthmus.recipes.rollout.right_answers import RightAnswers, result_of, without_reasoning


class MathVerify:
    """``math_verify``: 1 if the answer equals the right one, else 0; None without a right answer that can be parsed.

    An answer may take forever or all memory (``9^9^9^9``), and math-verify's own time limits need signals of the main
    thread. So a child process verifies; an answer that takes too much is wrong, and counted in the metric
    ``math_verify_failures``.
    """

    def __init__(self, setting: str) -> None:
        """Raises UsageError if the library is not installed."""
        self.setting = setting
        self._right = RightAnswers(setting)
        check_installed("rollout.reward=math_verify", "math_verify", otherwise="omit it")
        hint = "Correct the installation: python -c 'import math_verify'"
        self._process = LimitedProcess("math_verify", hint)

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
                    known[expected, answer] = self._process.reply(expected, answer)
                replies.append(known[expected, answer])
            failures += "failed" in replies
            rewards.append(None if all(reply is None for reply in replies) else float(True in replies))
        batch.logged_metrics["math_verify_failures"] = float(failures)
        return rewards
