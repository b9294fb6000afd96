"""What a run does not wait for after a stop request: a long step or evaluation is abandoned, on all ranks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.parallel.process_groups import sum_over_ranks
from isthmus.errors import Preempted
from isthmus.train.stop import StopFlag


class Abandoned(Exception):
    """Training ends with the state after step ``done``, which is unchanged; ``part`` of the run is not completed."""

    def __init__(self, done: int, part: str = "") -> None:
        super().__init__(done, part)
        self.done = done
        self.part = part


def preempted(done: int, steps: int, part: str) -> Preempted:
    """The error of a run that was stopped after ``done`` of ``steps`` steps; ``part`` as in :class:`Abandoned`."""
    incomplete = f" ({part} was not completed)" if part else ""
    if done == 0:
        return Preempted(f"stopped before the first step, as requested{incomplete}. The same command starts again.")
    return Preempted(
        f"stopped after step {done} of {steps} as requested{incomplete}; the state is saved. The same command resumes "
        "from there."
    )


@dataclass(slots=True)
class GracePeriod:
    """Decisions are the same on all ranks, of which one may have received the signal."""

    stop: StopFlag
    seconds: float
    device: torch.device
    has_stages: bool
    """Pipeline stages cannot abandon a step together, see :mod:`isthmus.train.concurrent_save`."""
    step_s: float | None = None
    """Seconds of the step before, mean over ranks; None before the first."""
    save_s: float = 0.0

    @property
    def fits_step(self) -> bool:
        """Whether a step and a save like those before end in time."""
        return self.step_s is not None and self.step_s + self.save_s < self.seconds

    def before_micro_batch(self, done: int, num_microbatches: int) -> Callable[[int], None] | None:
        """What abandons the step after ``done`` others, if it is too long to be completed after a stop request."""
        if self.has_stages or num_microbatches == 1 or self.fits_step:
            return None
        started_s = time.monotonic()

        def check(completed: int) -> None:
            remaining_s = (time.monotonic() - started_s) * (num_microbatches / completed - 1)
            late = self.stop.requested and self.stop.waiting_s + remaining_s + self.save_s > self.seconds
            self._abandon_if(late, done, f"step {done + 1}")

        return check

    def late_in_step(self) -> Callable[[], bool]:
        """To be asked during the step that begins now: whether its rest and a save exceed the grace period."""
        started_s = time.monotonic()

        def is_late() -> bool:
            elapsed_s = time.monotonic() - started_s
            remaining_s = 0.0 if self.step_s is None else max(0.0, self.step_s - elapsed_s)
            save_s = self.save_s or self.seconds / 2  # none was measured
            return self.stop.requested and self.stop.waiting_s + remaining_s + save_s > self.seconds

        return is_late

    def evaluated(self, batches: Iterator[Sequence[PackedBatch]], done: int) -> Iterator[Sequence[PackedBatch]]:
        """The batches of an evaluation, which has half of the time: a save follows."""
        for batch in batches:
            self._abandon_if(self.half_over, done, "the evaluation")
            yield batch

    @property
    def half_over(self) -> bool:
        return self.stop.waiting_s > self.seconds / 2

    def check(self, done: int, part: str) -> None:
        """Abandon a ``part`` of the run that the same command repeats, in half of the time; a collective."""
        self._abandon_if(self.half_over, done, part)

    def _abandon_if(self, late: bool, done: int, part: str) -> None:
        (ranks,) = sum_over_ranks([float(late)], self.device)
        if ranks:
            raise Abandoned(done, part)
