"""Rewards that need no code: equality with the right answer of the record, and a regular expression."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from isthmus.errors import DataError, UsageError, escaped
from isthmus.recipes.rollout.answer_batch import AnswerBatch, missing_column
from isthmus.recipes.rollout.limited_process import LimitedProcess

RIGHT_ANSWERS = ("ground_truth", "answer", "label", "solution")
"""Fields of right answers: the first one that a record has counts. verl's is nested in ``reward_model``."""
_MARK = "####"
"""Before the result in the answers of GSM8K."""
_REASONING_END = "</think>"


class RightAnswers:
    """The right answers of a batch, from the column of a setting ``NAME`` or ``NAME:COLUMN``."""

    def __init__(self, setting: str) -> None:
        self.setting = setting
        name, colon, column = setting.partition(":")
        if colon and not column:
            raise UsageError(f"rollout.reward {setting} lacks a field. Give {name}:COLUMN, or {name} alone.")
        self._columns = (column,) if column else RIGHT_ANSWERS
        self._name = name

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise DataError if no record has a right answer."""
        if not any(column in columns for column in self._columns):
            hint = f"Name their field: rollout.reward={self._name}:COLUMN."
            raise missing_column(self.setting, " or ".join(self._columns), columns, hint)

    def of(self, batch: AnswerBatch) -> list[list[str]]:
        """The right answers to each prompt, one of which is enough; empty for a record without.

        Raises:
            DataError: a value is not text, a number, or a list of them.
        """
        rows = zip(*(batch.columns.get(name, [None] * len(batch.texts)) for name in self._columns), strict=True)
        return [self._texts(next((cell for cell in cells if cell is not None), None)) for cells in rows]

    def _texts(self, cell: Any) -> list[str]:
        values = [] if cell is None else cell if isinstance(cell, list) else [cell]
        for value in values:
            if not isinstance(value, str | int | float):
                raise DataError(
                    f"rollout.reward {escaped(self.setting)}: a right answer must be text, a number, or a list of "
                    f"them, got {escaped(repr(cell)):.100}. Name another field: {self._name}:COLUMN."
                )
        whole = [int(value) if isinstance(value, float) and value.is_integer() else value for value in values]
        return [result_of(str(value)) for value in whole]


class ExactMatch:
    """``exact_match``: 1 if the answer is the right one, else 0; None for a record without a right answer."""

    def __init__(self, setting: str) -> None:
        """Raises UsageError for ``exact_match:`` without a column."""
        self.setting = setting
        self._right = RightAnswers(setting)

    def check_columns(self, columns: Collection[str]) -> None:
        """Raise DataError if no record has a right answer."""
        self._right.check_columns(columns)

    def __call__(self, batch: AnswerBatch) -> list[float | None]:
        """Compare :func:`result_of` both."""
        pairs = zip(batch.texts, self._right.of(batch), strict=True)
        return [float(result_of(without_reasoning(text)) in right) if right else None for text, right in pairs]


class FormatMatch:
    """``format:EXPRESSION``: 1 if the expression matches the complete answer, in which ``.`` is any character, else 0.

    An expression may backtrack for years, with Python's lock. So a child process matches; an answer that takes too
    much gets 0, and is counted in the metric ``format_failures``.
    """

    def __init__(self, setting: str) -> None:
        """Raises UsageError for an expression that is empty or no regular expression."""
        self.setting = setting
        expression = setting.partition(":")[2]
        if not expression:
            raise UsageError("rollout.reward format lacks an expression. Give format:EXPRESSION.")
        try:
            re.compile(expression, re.DOTALL)
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(
                f"rollout.reward {escaped(setting)} is not a regular expression of Python: {error}. Correct it."
            ) from error
        self._expression, self._process = expression, LimitedProcess("format", "Check the memory of this machine.")

    def check_columns(self, columns: Collection[str]) -> None:
        """It reads no field."""

    def __call__(self, batch: AnswerBatch) -> list[float]:
        """Match each answer in the child process."""
        replies = [self._process.reply(self._expression, text) for text in batch.texts]
        failures = batch.logged_metrics.get("format_failures", 0.0)  # of another expression
        batch.logged_metrics["format_failures"] = failures + replies.count("failed")
        return [float(reply is True) for reply in replies]


def without_reasoning(text: str) -> str:
    """An answer without the reasoning before it, which ends with ``</think>``."""
    return text.rpartition(_REASONING_END)[2]


def result_of(text: str) -> str:
    """The text after the last ``####``, as in GSM8K, or all of it; without spaces at both ends."""
    return text.rpartition(_MARK)[2].strip()
