"""What watches the steps of a run attaches to the events of the trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.train.metrics import StepMetrics


class Watcher:
    """Base class; override the events that you need.

    Steps are counted from 1. Every rank has the same watchers, and calls them in the same order: an event may contain
    collectives. User code has :class:`isthmus.Callback` instead, on one rank.
    """

    def context(self, step: int) -> AbstractContextManager[None]:
        """A context around the step."""
        return nullcontext()

    def step_started(self, step: int, batches: Sequence[PackedBatch]) -> None:
        """Before the forward pass of this rank's micro batches."""

    def host_numbers(self, step: int) -> Sequence[float]:
        """Numbers to sum over the ranks with the loss, as many on each; called after the backward pass."""
        return ()

    def metrics(self, step: int, sums: Sequence[float]) -> Mapping[str, float]:
        """Metrics to report with those of the step, from the summed :meth:`host_numbers`."""
        return {}

    def step_finished(self, metrics: StepMetrics) -> None:
        """After the metrics of the step are reported."""

    def stopping(self) -> None:
        """Before the state is saved because of a stop request."""

    def ended(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        """After the last step of this process, or the error that ended it."""
