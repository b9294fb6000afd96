"""Steps that float16 overflows skip: each is reported, and a run without any update fails."""

from __future__ import annotations

from isthmus.engine.step import Stepper
from isthmus.errors import Diverged
from isthmus.train.metrics import StepMetrics
from isthmus.train.reporter import Reporter
from isthmus.train.watcher import Watcher


class SkippedSteps(Watcher):
    def __init__(self, stepper: Stepper, reporter: Reporter) -> None:
        self._stepper, self._reporter = stepper, reporter
        self._before = stepper.skipped

    def step_finished(self, metrics: StepMetrics) -> None:
        """Record that the gradient of the step overflowed, and warn if that repeats."""
        row = self._stepper.skipped_in_a_row
        if not row:
            return
        text = (
            f"warning: {row} step{'s' * (row > 1)} in a row did not change the weights: float16 overflowed. "
            f"The loss scale is now {self._stepper.loss_scale:g}, half after each; see train.initial_loss_scale."
        )
        warns = row >= 4 and row.bit_count() == 1
        self._reporter.event(metrics.step, "skipped step", text, prints=warns, loss_scale=self._stepper.loss_scale)

    def check_updates(self, start: int, end: int) -> None:
        """Raise Diverged if all steps after ``start``, up to ``end``, were skipped."""
        if start < end and self._stepper.skipped - self._before == end - start:
            raise Diverged(
                f"none of the steps {start + 1} to {end} changed the weights: each gradient overflowed in float16, "
                f"and halved the loss scale, now {self._stepper.loss_scale:g}; nothing is exported. Set "
                "train.initial_loss_scale to that or less, raise train.steps, or use train.precision=bf16."
            )
