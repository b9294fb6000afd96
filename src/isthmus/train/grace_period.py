"""What a run does not wait for after a stop request: a long step or evaluation is abandoned, on all ranks at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.parallel.process_groups import sum_over_ranks
from isthmus.train.stop import StopFlag


class Abandoned(Exception):
    """Training ends with the state after step ``done``, which is unchanged; ``part`` of the run is not completed."""

    def __init__(self, done: int, part: str = "") -> None:
        super().__init__(done, part)
        self.done, self.part = done, part


@dataclass(slots=True)
class GracePeriod:
    """Decisions are the same on all ranks, of which one may have received the signal."""

    stop: StopFlag
    seconds: float
    device: torch.device
    has_stages: bool
    """Pipeline stages work on different micro batches at the same time, so they complete their step."""
    step_s: float | None = None
    """Of the step before, mean over ranks; None before the first."""
    save_s: float = 0.0

    @property
    def fits_step(self) -> bool:
        """Whether a step and a save like those before end in time."""
        return self.step_s is not None and self.step_s + self.save_s < self.seconds

    def between_micro_batches(self, done: int, num_microbatches: int) -> Callable[[int], None] | None:
        """To be called in the step after ``done`` others, if it is too long to be completed after a stop request."""
        if self.has_stages or num_microbatches == 1 or self.fits_step:
            return None
        started_s = time.monotonic()

        def check(completed: int) -> None:
            remaining_s = (time.monotonic() - started_s) * (num_microbatches / completed - 1)
            late = self.stop.requested and self.stop.waiting_s + remaining_s + self.save_s > self.seconds
            self._abandon_if(late, done, f"step {done + 1}")

        return check

    def evaluated(self, batches: Iterator[Sequence[PackedBatch]], done: int) -> Iterator[Sequence[PackedBatch]]:
        """The batches of an evaluation, which has half of the time: a save follows."""
        for batch in batches:
            self._abandon_if(self.half_over, done, "the evaluation")
            yield batch

    @property
    def half_over(self) -> bool:
        return self.stop.waiting_s > self.seconds / 2

    def _abandon_if(self, late: bool, done: int, part: str) -> None:
        (ranks,) = sum_over_ranks([float(late)], self.device)
        if ranks:
            raise Abandoned(done, part)
