"""The rollouts of a run as a source of micro batches: when they are generated, and their part of checkpoints."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.data.batching.rollout_batches import PromptBatches, RolloutBatches
from isthmus.engine.generation.inference import Inference
from isthmus.engine.generation.layer_differences import first_difference
from isthmus.engine.optim.state_offload import StateOffload
from isthmus.engine.step import EvalResult, TokenPeak
from isthmus.recipes.rollout.rollout_maker import PendingRollout, RolloutMaker
from isthmus.recipes.rollout.rollout_state import Rollout, RolloutState
from isthmus.recipes.rollout.weights_copy import WeightsCopy

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
    _policy: WeightsCopy | None = None
    """The weights that generate a pending rollout beside the updates that change them."""

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
        if self._pending is not None and self._pending.step < step:
            self._complete_pending()
        if self._next is None:
            return self._generated(step, step)
        rollout, self._next = self._next, None
        return rollout

    def _start_next(self, step: int) -> None:
        """Begin to generate the rollout after the present one, whose updates begin now."""
        first_step = step + self._updates
        if self._next is not None or first_step >= self.maker.total_steps:
            return
        if not self.maker.engine.overlaps_training:
            self._next = self._generated(step, first_step)
            return
        self._pending = self.maker.start(step, first_step)
        if self._policy is None:
            self._policy = WeightsCopy(self.maker.stepper.model)
        else:
            self._policy.update()

    def _generated(self, step: int, first_step: int) -> Rollout:
        with self._state_on_host():
            self._pending = self.maker.start(step, first_step)
            return self._completed()

    def _state_on_host(self) -> AbstractContextManager[None]:
        """Generation has the memory of gradients and optimizer state with ``rollout.offload``."""
        return nullcontext() if self.offload is None else self.offload.on_host()

    def _completed(self, policy: WeightsCopy | None = None) -> Rollout:
        assert self._pending is not None
        rollout, self._pending = self.maker.complete(self._pending, policy), None
        return rollout

    def _complete_pending(self) -> None:
        self._next = self._completed(self._policy)

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
            self._complete_pending()
        with self._state_on_host():
            return self.maker.evaluate(step, prompts)

    def state(self, done: int) -> RolloutState:
        """What a run that is resumed after ``done`` steps needs.

        A rollout that is generated with the weights of these steps is not a part of it: the resumed run generates the
        same. One of earlier weights is waited for.
        """
        if self._pending is not None and self._pending.step < done:
            self._complete_pending()
        rollout, consumed = self._rollout, self.maker.consumed
        if rollout is not None and done == rollout.first_step + self._updates:
            rollout = None  # all updates are done
        if self._pending is not None:
            consumed = self._pending.position
        return RolloutState(consumed, rollout, self._next)

    def load(self, checkpoint: Path) -> None:
        """Continue from the state in the folder of a checkpoint."""
        state = RolloutState.read(checkpoint)
        self.maker.consumed, self._rollout, self._next = state.consumed, state.rollout, state.next_rollout

    def close(self) -> None:
        """End what generates."""
        self.maker.engine.close()
