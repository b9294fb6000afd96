"""When rollouts are generated, and what a checkpoint has of them, with an engine that generates beside training."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from torch import nn

from isthmus.data.batching.rollout_batches import GeneratedAnswers
from isthmus.recipes.rollout.rollout_maker import PendingRollout
from isthmus.recipes.rollout.rollout_state import PlannedRollout, Rollout
from isthmus.recipes.rollout.rollouts import Rollouts
from isthmus.train.grace_period import Abandoned

PROMPTS = 3
"""Prompts of a rollout."""


class Maker:
    """In place of a :class:`RolloutMaker`; each rollout has its number as tokens."""

    def __init__(self, *, ahead: int, updates: int, steps: int, overlaps: bool = True) -> None:
        grpo, rollout = SimpleNamespace(updates_per_rollout=updates), SimpleNamespace(ahead=ahead)
        self.config = SimpleNamespace(grpo=grpo, rollout=rollout)
        self.engine = SimpleNamespace(overlaps_training=overlaps, close=lambda: None)
        self.stepper = SimpleNamespace(model=[nn.Linear(1, 1)])
        self.total_steps, self.consumed = steps, 0
        self.events: list[tuple[Any, ...]] = []
        self.stopped = False
        self.reporter = SimpleNamespace(event=lambda *event: self.events.append(event[:2]))

    def start(self, step: int, first_step: int) -> PendingRollout:
        position, self.consumed = self.consumed, self.consumed + PROMPTS
        self.events.append(("start", step, first_step))
        return PendingRollout(step=step, first_step=first_step, position=position, request=None, start_s=0)  # type: ignore[arg-type]

    def complete(self, pending: PendingRollout, done: int, policy: Any = None) -> Rollout:
        if self.stopped:
            raise Abandoned(done)
        self.events.append(("complete", pending.step, "copy" if policy else "present"))
        number = pending.position // PROMPTS
        answers = GeneratedAnswers(
            prompts=[[0]],
            answers=[[number]],
            advantages=np.zeros(1),
            weights=np.ones(1),
            sampling_logps=[np.zeros(1)],
        )
        return Rollout(first_step=pending.first_step, answers=answers, metrics={})

    def with_old_logps(self, rollout: Rollout) -> Rollout:
        return rollout

    def micro_batches(self, answers: GeneratedAnswers) -> Any:
        return SimpleNamespace(step=lambda update: [(answers.answers[0][0], update)])

    def evaluate(self, step: int, prompts: Any) -> None:
        self.events.append(("evaluate", step))


def build(**settings: Any) -> tuple[Rollouts, Maker]:
    maker = Maker(**settings)
    return Rollouts(maker, None, None), maker  # type: ignore[arg-type]


def first_batches(rollouts: Rollouts, steps: range, count: int) -> list[Sequence[Any]]:
    source: Any = rollouts.batches(steps)
    return [next(source)[0] for _ in range(count)]


@pytest.mark.parametrize("updates", [1, 2])
def test_the_next_rollout_is_started_before_the_updates_on_the_present_one(updates: int) -> None:
    rollouts, maker = build(ahead=1, updates=updates, steps=3 * updates)
    assert first_batches(rollouts, range(3 * updates), 3 * updates) == [
        (k, u) for k in range(3) for u in range(updates)
    ]
    assert maker.events == [
        ("start", 0, 0),
        ("complete", 0, "present"),
        ("start", 0, updates),
        ("complete", 0, "copy"),
        ("start", updates, 2 * updates),
        ("complete", updates, "copy"),
    ]


def test_without_a_rollout_ahead() -> None:
    rollouts, maker = build(ahead=0, updates=1, steps=2)
    assert first_batches(rollouts, range(2), 2) == [(0, 0), (1, 0)]
    assert maker.events == [("start", 0, 0), ("complete", 0, "present"), ("start", 1, 1), ("complete", 1, "present")]


def test_an_engine_that_does_not_overlap_generates_with_the_present_weights() -> None:
    rollouts, maker = build(ahead=1, updates=2, steps=4, overlaps=False)
    first_batches(rollouts, range(4), 1)
    assert maker.events[-2:] == [("start", 0, 2), ("complete", 0, "present")]


def test_a_checkpoint_waits_for_answers_of_earlier_weights() -> None:
    rollouts, _ = build(ahead=1, updates=2, steps=6)
    first_batches(rollouts, range(6), 1)
    state = rollouts.state(1)
    assert state.rollout is not None and state.rollout.answers.answers == [[0]]
    assert state.next_rollout is not None and state.next_rollout.answers.answers == [[1]]
    assert state.consumed == 2 * PROMPTS
    done = rollouts.state(2)
    assert done.rollout is None and done.next_rollout == state.next_rollout


def test_a_checkpoint_does_not_wait_for_answers_of_its_own_weights() -> None:
    """The resumed run generates them again."""
    rollouts, maker = build(ahead=1, updates=1, steps=6)
    first_batches(rollouts, range(6), 2)
    events = len(maker.events)
    state = rollouts.state(1)
    assert state.rollout is not None and state.rollout.answers.answers == [[1]]
    assert state.next_rollout is None and state.consumed == 2 * PROMPTS and len(maker.events) == events
    resumed, maker = build(ahead=1, updates=1, steps=6)
    maker.consumed, resumed._rollout, resumed._next = state.consumed, state.rollout, state.next_rollout
    assert first_batches(resumed, range(1, 6), 2) == [(1, 0), (2, 0)]
    assert maker.events[0] == ("start", 1, 2)


def test_a_checkpoint_after_a_stop_request_does_not_wait_for_long() -> None:
    """It has the plan of the rollout, which its weights generate when the run is resumed."""
    rollouts, maker = build(ahead=1, updates=2, steps=6)
    first_batches(rollouts, range(6), 1)
    maker.stopped = True
    state = rollouts.state(1)
    assert state.rollout is not None and state.next_rollout is None
    assert state.planned == PlannedRollout(step=0, first_step=2, position=PROMPTS) and state.consumed == PROMPTS
    assert maker.events[-1] == (1, "rollout")
    maker.stopped = False
    rollouts._batches = None
    assert first_batches(rollouts, range(1, 6), 2) == [(0, 1), (1, 0)]
    assert maker.events[-3:-1] == [("start", 0, 2), ("complete", 0, "copy")]


def test_the_end_of_a_run_plans_the_rollout_of_a_longer_run() -> None:
    rollouts, maker = build(ahead=1, updates=1, steps=1)
    first_batches(rollouts, range(1), 1)
    assert rollouts.state(0).planned is None  # the weights are those of the checkpoint
    assert rollouts.state(1).planned == PlannedRollout(step=0, first_step=1, position=PROMPTS)
    assert maker.events == [("start", 0, 0), ("complete", 0, "present")]


def test_an_evaluation_waits_before_it_changes_the_weights_of_the_engine() -> None:
    rollouts, maker = build(ahead=1, updates=1, steps=6)
    first_batches(rollouts, range(6), 1)
    rollouts.evaluate(1, None)  # type: ignore[arg-type]
    assert maker.events[-2:] == [("complete", 0, "copy"), ("evaluate", 1)]
