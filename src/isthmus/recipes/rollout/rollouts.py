"""The rollouts of a run as a source of micro batches: when they are generated, and their part of checkpoints."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.data.batching.rollout_batches import PromptBatches, RolloutBatches
from isthmus.engine.checkpoint.copied_weights import copied_entries, load_copies
from isthmus.engine.generation.inference import Inference
from isthmus.engine.generation.layer_differences import first_difference
from isthmus.engine.optim.state_offload import StateOffload
from isthmus.engine.step import EvalResult, TokenPeak
from isthmus.recipes.rollout.rollout_maker import PendingRollout, RolloutMaker
from isthmus.recipes.rollout.rollout_state import PlannedRollout, Rollout, RolloutState
from isthmus.recipes.rollout.weights_copy import WeightsCopy
from isthmus.train.grace_period import Abandoned

_POLICY = "rollout_policy"
"""Prefix of the keys of the weights of a planned rollout in a checkpoint."""
_MOST_EXPLAINED = 3
"""Differences whose layer is searched for in a process."""


@dataclass(slots=True)
class Rollouts:
    """Methods are collectives.

    With ``rollout.ahead=0`` a rollout is generated when all updates on the one before it are done. With 1 it is
    generated with the weights before these updates, beside them if the engine can.
    """

    maker: RolloutMaker
    inference: Inference | None
    """Of the native engine, to find the layers where generation and training differ."""
    tolerance: float | None
    """Largest difference of log-probabilities in generation and training; None: any."""
    offload: StateOffload | None = None
    """None: the optimizer state stays in place."""
    _explained: int = 0
    _rollout: Rollout | None = None
    """The one that is trained on."""
    _batches: RolloutBatches | None = field(default=None, repr=False)
    _next: Rollout | None = None
    """The one after ``_rollout``, if it is generated already."""
    _pending: PendingRollout | None = None
    _planned: PlannedRollout | None = None
    """The one after ``_rollout``, if its generation was abandoned, or the run ends before it."""
    _policy: WeightsCopy | None = None
    """The weights that generate a pending or planned rollout."""

    def metrics(self, step: int) -> Mapping[str, float]:
        """Metrics of the rollout whose first update is ``step``, counted from 1; none in its other updates."""
        rollout = self._rollout
        return {} if rollout is None or step != rollout.first_step + 1 else rollout.metrics

    @property
    def present_metrics(self) -> Mapping[str, float]:
        """Metrics of the rollout that is trained on, in each of its updates."""
        return {} if self._rollout is None else self._rollout.metrics

    @property
    def _updates(self) -> int:
        return self.maker.config.grpo.updates_per_rollout

    def batches(self, steps: range) -> Generator[Sequence[PackedBatch], None, None]:
        """The micro batches of this rank in each step; generates when all answers were trained on."""
        for step in steps:
            if self._rollout is None or step == self._rollout.first_step + self._updates:
                self._rollout = self._batches = None  # frees their memory first
                self._rollout = self.maker.with_old_logps(self._take_next(step))
            if self.maker.config.rollout.ahead and step == self._rollout.first_step:
                self._start_next(step)
            if self._batches is None:
                self._batches = self.maker.micro_batches(self._rollout.answers)
            yield self._batches.step(step - self._rollout.first_step)

    def _take_next(self, step: int) -> Rollout:
        """The rollout to train on after ``step``: it was started before, or is generated now."""
        if self._planned is not None:
            self._start_planned()
        if self._pending is not None and self._pending.step < step:
            self._complete_pending(step)
        if self._next is None:
            return self._generated(step, step)
        rollout, self._next = self._next, None
        return rollout

    def _start_next(self, step: int) -> None:
        """Begin to generate the rollout after the present one, whose updates begin now."""
        first_step, is_last = step + self._updates, step + self._updates >= self.maker.total_steps
        if self._next is not None:
            return
        if not (is_last or self.maker.engine.overlaps_training):
            self._next = self._generated(step, first_step)
            return
        if is_last:  # a run with more steps generates it
            self._planned = PlannedRollout(step=step, first_step=first_step, position=self.maker.consumed)
        else:
            self._pending = self.maker.start(step, first_step)
        if self._policy is None:
            self._policy = WeightsCopy(self.maker.stepper.model)
        else:
            self._policy.update()

    def _start_planned(self) -> None:
        """Generate a planned rollout with its weights."""
        assert self._planned is not None and self._policy is not None
        planned, self._planned = self._planned, None
        self.maker.consumed = planned.position
        with self._policy.loaded():
            if self.maker.engine.overlaps_training:
                self._pending = self.maker.start(planned.step, planned.first_step)
            else:
                self._next = self._generated(planned.step, planned.first_step)

    def _generated(self, step: int, first_step: int) -> Rollout:
        with self._state_on_host():
            self._pending = self.maker.start(step, first_step)
            return self._completed(step)

    def _state_on_host(self) -> AbstractContextManager[None]:
        """Generation has the memory of gradients and optimizer state with ``rollout.offload``."""
        return nullcontext() if self.offload is None else self.offload.on_host()

    def _completed(self, done: int, policy: WeightsCopy | None = None) -> Rollout:
        assert self._pending is not None
        rollout, self._pending = self.maker.complete(self._pending, done, policy), None
        return rollout

    def _complete_pending(self, done: int) -> None:
        """Wait for the answers of a rollout of earlier weights.

        Raises:
            Abandoned: after a stop request they take too long. The state after ``done`` steps has what generates them.
        """
        pending = self._pending
        assert pending is not None
        try:
            self._next = self._completed(done, self._policy)
        except Abandoned:
            self._pending = None
            self._planned = PlannedRollout(step=pending.step, first_step=pending.first_step, position=pending.position)
            text = f"the answers of the rollout of step {pending.first_step + 1} are abandoned; resuming generates them"
            self.maker.reporter.event(done, "rollout", text)
            raise

    def check_logps(self, step: int, peak: TokenPeak | None) -> None:
        """Report the token and the layer where generation and training differ, if they do by more than the tolerance.

        Args:
            step: counted from 1.
            peak: the token of the step with the largest difference of log-probabilities.
        """
        if peak is None or self.tolerance is None or peak.value <= self.tolerance:
            return
        assert self._rollout is not None
        answers, sample, maker = self._rollout.answers, peak.sample, self.maker
        prompt, answer = answers.prompts[sample], answers.answers[sample]
        place = peak.position - len(prompt)
        text = (
            f"step {step}: the log-probabilities of token {place + 1} of an answer ({maker.decode([answer[place]])!r}) "
            f"differ by {peak.value:.3g} between generation and training, more than {self.tolerance:g} "
            "(rollout.logp_tolerance)"
        )
        details: dict[str, Any] = {"difference": peak.value, "answer": sample, "token": place}
        if self.inference is not None and self._explained < _MOST_EXPLAINED:
            self._explained += 1
            tokens = [*prompt, *answer][: peak.position + 1]
            first = first_difference(self.inference, tokens, len(prompt), self.tolerance)
            if first is None:
                text += ". The layers agree, with the weights after the step: the output layer differs"
            else:
                text += (
                    f". The first difference is in layer {first.layer} at token {first.position + 1 - len(prompt)} of "
                    f"the answer, relative {first.difference:.3g}, with the weights after the step"
                )
                details |= {"layer": first.layer, "first_token": first.position - len(prompt)}
        maker.reporter.event(step, "logp difference", f"warning: {text}", **details)

    def evaluate(self, step: int, prompts: PromptBatches) -> EvalResult:
        """Mean reward of the most probable answers; the loss is the negated reward."""
        if self._pending is not None:  # the engine gets other weights
            self._complete_pending(step)
        with self._state_on_host():
            return self.maker.evaluate(step, prompts)

    def state(self, done: int) -> RolloutState:
        """What a run that is resumed after ``done`` steps needs.

        A rollout that is generated with the weights of these steps is not a part of it: the resumed run generates the
        same. One of earlier weights is waited for. After a stop request that may be abandoned: the state then has its
        weights (:meth:`planned_weights`).
        """
        if self._pending is not None and self._pending.step < done:
            with suppress(Abandoned):
                self._complete_pending(done)
        rollout, consumed = self._rollout, self.maker.consumed
        if rollout is not None and done == rollout.first_step + self._updates:
            rollout = None  # all updates are done
        if self._pending is not None:
            consumed = self._pending.position
        planned = self._planned
        if planned is not None:
            consumed = planned.position
        return RolloutState(consumed, rollout, self._next, planned if planned and planned.step < done else None)

    def planned_weights(self, state: RolloutState) -> dict[str, Any]:
        """Checkpoint entries of the weights that generate the planned rollout of a state, if it has one."""
        if state.planned is None:
            return {}
        assert self._policy is not None
        return dict(copied_entries(self.maker.stepper, self._policy.copies, _POLICY))

    def load(self, checkpoint: Path) -> None:
        """Continue from the state in the folder of a checkpoint."""
        state = RolloutState.read(checkpoint)
        self.maker.consumed, self._rollout, self._next = state.consumed, state.rollout, state.next_rollout
        self._planned = state.planned
        if state.planned is not None:
            self._policy = WeightsCopy(self.maker.stepper.model)
            load_copies(checkpoint, self.maker.stepper, self._policy.copies, _POLICY)

    def close(self) -> None:
        """End what generates."""
        self.maker.engine.close()
