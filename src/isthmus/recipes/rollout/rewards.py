"""Rewards of generated answers: the functions of ``rollout.reward``, and the weighted sum of their values.

A reward is one of:

===============================  ==========================================================================
``FILE.py:FUNCTION``             a function with TRL's or verl's signature, in a file
``MODULE:FUNCTION``              the same in a module, which may be in the current folder
``exact_match``                  1 if the answer equals the right one, else 0
``math_verify``                  1 if both are the same by mathematics, else 0 (library math-verify)
``format:EXPRESSION``            1 if the regular expression matches the complete answer, else 0
a folder, or an id on the Hub    the score of a reward model
===============================  ==========================================================================

``exact_match:COLUMN`` and ``math_verify:COLUMN`` name the column of the right answer.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import numbers
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from isthmus.config.schema import RunConfig
from isthmus.config.schema.grpo import RolloutConfig
from isthmus.errors import DataError, Hang, UsageError, counted, escaped
from isthmus.recipes.rollout.answer_batch import AnswerBatch, Reward, TrainerState
from isthmus.recipes.rollout.reward_functions import FunctionReward, failure, is_function
from isthmus.recipes.rollout.right_answers import ExactMatch, FormatMatch
from isthmus.recipes.rollout.verified_math import MathVerify

_SHOWN = 200
"""Characters of an answer or of a record in a message."""
_SHIPPED: Mapping[str, type[ExactMatch] | type[FormatMatch] | type[MathVerify]] = {
    "exact_match": ExactMatch,
    "format": FormatMatch,
    "math_verify": MathVerify,
}


@dataclass(frozen=True, slots=True)
class RewardTable:
    """The rewards of answers."""

    values: npt.NDArray[np.float64]
    """[answers, rewards], NaN where a reward does not apply."""
    totals: npt.NDArray[np.float64]
    """[answers], weighted sums of the rewards that apply; NaN where none does: that answer has no part in the baseline
    of its group and no advantage, as in TRL."""
    seconds: tuple[float, ...]
    """Time of each reward; asynchronous ones run at the same time."""
    columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Values by answer that functions gave to ``log_extra``, for the samples."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that rewards gave to ``log_metric``."""
    warning: str | None = None
    """What to tell the user if no reward applies to some answers."""


class Rewards:
    """The rewards of a run, computed by one process within a time limit."""

    def __init__(self, rewards: Sequence[Reward], config: RolloutConfig) -> None:
        self._rewards = tuple(rewards)
        self._weights = np.array(config.weights)
        self._timeout_s = config.timeout_s

    def check_columns(self, columns: Collection[str]) -> None:
        """Check before the first step that the records have the fields that the rewards read.

        Args:
            columns: names of the fields of all records.

        Raises:
            DataError: a reward reads a field that no record has.
        """
        for reward in self._rewards:
            reward.check_columns(columns)

    def compute(
        self,
        records: Sequence[Mapping[str, Any]],
        texts: Sequence[str],
        completion_ids: Sequence[Sequence[int]],
        *,
        step: int = 0,
        total_steps: int = 0,
    ) -> RewardTable:
        """Compute all rewards of some answers.

        Args:
            records: the record of each answer's prompt; its field ``prompt`` is text or messages, as in the data.
            texts: each answer.
            completion_ids: token ids of each answer.
            step: optimizer steps done.
            total_steps: optimizer steps of the run.

        Raises:
            UsageError: a function raised, or returned something else than a finite number or None for each answer.
            Hang: the rewards took more than ``rollout.timeout_s``. The thread that computes them cannot be ended; it
                is a daemon, so that the process can end.
            DataError: no reward applies to any of the answers, or a record has an unusable right answer.
        """
        batch = AnswerBatch.of(records, texts, completion_ids, TrainerState(step, total_steps))
        work = _Work(self._rewards, batch)
        thread = threading.Thread(target=work, name="rewards", daemon=True)
        thread.start()
        thread.join(self._timeout_s)
        if thread.is_alive():
            raise self._timeout(work)
        if work.error is not None:
            raise work.error
        rows = [_checked(reward, result, batch) for reward, result in zip(self._rewards, work.results, strict=True)]
        values = np.array(rows, dtype=np.float64).T
        unscored = np.isnan(values).all(axis=1)
        totals = np.where(unscored, math.nan, np.nansum(values * self._weights, axis=1))
        warning = _unscored(batch, np.flatnonzero(unscored)) if unscored.any() else None
        return RewardTable(values, totals, tuple(work.seconds), batch.logged_columns, batch.logged_metrics, warning)

    def _timeout(self, work: _Work) -> Hang:
        slow = " and ".join(escaped(reward.setting) for reward in work.running() or self._rewards)
        return Hang(
            f"rollout.reward {slow} did not finish: the rewards of {counted(len(work.batch.texts), 'answer')} took "
            f"more than rollout.timeout_s={self._timeout_s:g}. Give its requests a time limit, make them at the same "
            "time in an async function, or raise rollout.timeout_s."
        )


class _Work:
    """Computes rewards in a thread."""

    def __init__(self, rewards: Sequence[Reward], batch: AnswerBatch) -> None:
        self.batch = batch
        self.results: list[Any] = [None] * len(rewards)
        self.seconds = [0.0] * len(rewards)
        self.error: BaseException | None = None
        self._rewards = rewards
        self._started_s: dict[int, float] = {}

    def running(self) -> list[Reward]:
        """The rewards that are computed now."""
        return [self._rewards[place] for place in list(self._started_s)]

    def __call__(self) -> None:
        """Compute all rewards, first the ordinary functions in order, then the asynchronous ones together."""
        pending: dict[int, Any] = {}
        try:
            for place, reward in enumerate(self._rewards):
                with self._timed(place):
                    result = reward(self.batch)
                if inspect.iscoroutine(result):
                    pending[place] = result
                else:
                    self.results[place] = result
            if pending:
                asyncio.run(self._await(pending))
        except BaseException as error:  # the thread that waits raises it
            self.error = error
            for result in pending.values():
                result.close()  # has no effect on a coroutine that ran

    async def _await(self, pending: Mapping[int, Any]) -> None:
        await asyncio.gather(*(self._await_one(place, result) for place, result in pending.items()))

    async def _await_one(self, place: int, result: Any) -> None:
        with self._timed(place):
            self.results[place] = await result

    @contextmanager
    def _timed(self, place: int) -> Iterator[None]:
        self._started_s[place] = start_s = time.monotonic()
        try:
            yield
        except (Exception, SystemExit) as error:
            raise failure(self._rewards[place].setting, error) from error
        finally:
            self.seconds[place] += time.monotonic() - start_s
            del self._started_s[place]


def check_rewards(config: RunConfig) -> None:
    """Check ``rollout.reward`` before a run, the files of functions last, because importing them runs their code.

    Raises:
        UsageError: an expression is wrong, a library is not installed, a file of functions fails, or a model is not a
            reward model.
        MissingInput: there is no such file, function, module, folder or repository.
    """
    for setting in sorted(config.rollout.reward, key=_is_user_code):
        _load(setting, config, None)


def load_rewards(config: RunConfig, device: torch.device) -> Rewards:
    """The rewards of ``rollout.reward``, for the process that computes them.

    Args:
        device: where reward models are computed.

    Raises the errors of :func:`check_rewards`, and DataError for a reward model whose weights cannot be read.
    """
    return Rewards([_load(setting, config, device) for setting in config.rollout.reward], config.rollout)


def _load(setting: str, config: RunConfig, device: torch.device | None) -> Reward:
    if (shipped := _SHIPPED.get(setting.partition(":")[0])) is not None:
        return shipped(setting)
    if is_function(setting):
        return FunctionReward(setting)
    from isthmus.recipes.rollout.reward_models import ModelReward  # imports the readers of model folders

    return ModelReward(setting, device, trust_remote_code=config.model.trust_remote_code)


def _is_user_code(setting: str) -> bool:
    return setting.partition(":")[0] not in _SHIPPED and is_function(setting)


def _checked(reward: Reward, result: Any, batch: AnswerBatch) -> list[float]:
    """The rewards of each answer, NaN for None."""
    returned, expected = f"rollout.reward {escaped(reward.setting)} returned", len(batch.texts)
    values = result.tolist() if isinstance(result, np.ndarray | torch.Tensor) else result
    if not isinstance(values, list | tuple):
        raise UsageError(
            f"{returned} {_shown(result)} of type {type(result).__name__}. Expected a list of {expected} numbers."
        )
    if len(values) != expected:
        raise UsageError(
            f"{returned} {counted(len(values), 'reward')} for {counted(expected, 'answer')}. Return one each."
        )
    for place, value in enumerate(values):
        if isinstance(value, np.generic | torch.Tensor) and value.ndim == 0:
            value = value.item()
        if value is None or (isinstance(value, numbers.Real) and math.isfinite(value)):
            continue
        raise UsageError(
            f"{returned} {_shown(value)} for answer {place + 1} of {expected}, {_shown(batch.texts[place])}. Expected "
            "a finite number, or None if the reward does not apply."
        )
    return [math.nan if value is None else float(value) for value in values]


def _unscored(batch: AnswerBatch, places: npt.NDArray[np.intp]) -> str:
    """The warning about answers to which no reward applies; DataError if these are all."""
    first = int(places[0])
    record = {name: values[first] for name, values in batch.columns.items()}
    text = (
        f"no reward applies to {len(places)} of {counted(len(batch.texts), 'answer')}; the first is "
        f"{_shown(batch.texts[first])}, and the fields of its record are {_shown(record)}"
    )
    if len(places) == len(batch.texts):
        raise DataError(f"{text}. Correct the records, or name a reward that applies to them with rollout.reward.")
    return f"{text}. These answers have no part in the loss."


def _shown(value: Any) -> str:
    text = escaped(repr(value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
