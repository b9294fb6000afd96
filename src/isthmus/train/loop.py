"""The training loop: next batch, step, say so, now and then evaluate and save, stop when asked."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Literal, Protocol

from isthmus.config.schema.output import CheckpointConfig
from isthmus.config.schema.train import TrainConfig
from isthmus.data.batching.prefetch import prefetched
from isthmus.engine.objective import PackedLine
from isthmus.engine.parallel.process_groups import Position, sum_over_ranks
from isthmus.engine.step import Stepper
from isthmus.engine.trace_region import phase
from isthmus.errors import Diverged, Preempted
from isthmus.families.architecture import Architecture
from isthmus.train.flops import flops_per_batch
from isthmus.train.metrics import Reporter, StepMetrics
from isthmus.train.step_profile import StepProfile
from isthmus.train.stop import StopFlag


class BatchSource(Protocol):
    """Where the lines of a step come from; :class:`isthmus.data.batching.batches.Batches` is one."""

    global_batch_size: int

    def step(self, step_index: int) -> Sequence[PackedLine]:
        """This rank's lines of step ``step_index``, counted from 0."""

    def eval_batches(self) -> Iterator[Sequence[PackedLine]]:
        """One pass over the data, as many batches on every rank."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What a step's speed is measured against."""

    world_size: int
    peak_tflops: float | None
    """Of one device at this run's precision; None where it is not known."""
    memory_gib: Callable[[], float]
    memory_used: Callable[[], float | None] = lambda: None
    """Share of the memory that is taken now."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a finished loop leaves."""

    last_loss: float | None
    valid_loss: float | None
    test_loss: float | None
    tokens_per_s: float | None
    """Over all steps of this call but the first, which warms up."""


class Loop:
    """Runs the steps of a run from where it stands to its end."""

    def __init__(
        self,
        stepper: Stepper,
        batches: BatchSource,
        validation: BatchSource | None,
        test: BatchSource | None = None,
        *,
        architecture: Architecture,
        position: Position,
        device: Device,
        reporter: Reporter,
        profile: StepProfile,
        save: Callable[[int], None],
        export: Callable[[int], None],
    ) -> None:
        self.stepper = stepper
        self.batches = batches
        self.validation = validation
        self.test = test
        self.architecture = architecture
        self.position = position
        self.device = device
        self.reporter = reporter
        self.profile = profile
        self.save = save
        self.export = export

    def evaluate(self, step: int, part: Literal["valid", "test"] = "valid") -> float | None:
        """Loss of held-out data after ``step`` steps, reported; None where there is none of that part.

        Raises:
            Diverged: it is not finite, so that such weights are neither saved nor exported.
        """
        source = self.validation if part == "valid" else self.test
        if source is None:
            return None
        with phase("held-out loss"):
            means = self.stepper.means(source.eval_batches())
        loss = means.loss
        self.reporter.evaluation(step, loss, means.figures, part=part)
        if not math.isfinite(loss):
            mend = "Lower optim.lr or lengthen optim.warmup_steps." if step else "Look at the weights and the data."
            raise Diverged(f"the held-out loss is {loss} after {step} steps; nothing is saved from there. {mend}")
        return loss

    def run(
        self, train: TrainConfig, checkpoint: CheckpointConfig, *, start: int, steps: int, stop: StopFlag
    ) -> Outcome:
        """Train from step ``start`` to ``steps``; the two sections set when to evaluate, save and export.

        Raises:
            Preempted: ``stop`` was requested on some rank; the state after the last whole step is saved.
            Diverged: the loss, the held-out loss or the gradient norm is not finite.
        """
        with self.profile, closing(prefetched(self.batches.step, range(start, steps))) as batches:
            return self._run(train, checkpoint, start, steps, batches, stop)

    def _run(
        self,
        train: TrainConfig,
        checkpoint: CheckpointConfig,
        start: int,
        steps: int,
        batches: Iterator[Sequence[PackedLine]],
        stop: StopFlag,
    ) -> Outcome:
        loss: float | None = None
        tokens, seconds = 0.0, 0.0
        for step in range(start, steps):
            with self.profile.around(step + 1), phase(f"step {step + 1}"):
                metrics, stop_requested = self._step(step, batches, stop)
            if stop_requested:
                self.profile.finish()  # what is saved now is no part of a step
            done = step + 1
            loss = metrics.loss
            if step > start:
                tokens, seconds = tokens + metrics.num_tokens, seconds + metrics.step_time_s
            if done < steps:
                if _due(train.eval_every, done):
                    self.evaluate(done)
                if _due(checkpoint.hf_every, done):
                    with phase("export"):
                        self.export(done)
                if stop_requested or _due(checkpoint.every, done):
                    with phase("checkpoint"):
                        self.save(done)
                if stop_requested:
                    raise Preempted(
                        f"stopped after step {done} of {steps} as asked; the state is saved. "
                        "The same command goes on from there."
                    )
        valid_loss, test_loss = self.evaluate(steps), self.evaluate(steps, "test")
        return Outcome(loss, valid_loss, test_loss, tokens / seconds if seconds else None)

    def _step(self, step: int, batches: Iterator[Sequence[PackedLine]], stop: StopFlag) -> tuple[StepMetrics, bool]:
        started_s = time.monotonic()
        with phase("data"):
            lines = next(batches)
        result = self.stepper.train_step(lines)
        lengths = [length for line in lines for length in _sample_lengths(line)]
        own = [sum(lengths), sum(length**2 for length in lengths), sum(line.input_ids.numel() for line in lines)]
        counts_here = self.position.tp_rank == self.position.pp_rank == self.position.cp_rank == 0
        num_tokens, sum_squared, places, stops = sum_over_ranks(
            [*(float(number) if counts_here else 0.0 for number in own), float(stop.requested)]
        )
        elapsed_s = time.monotonic() - started_s
        flops = flops_per_batch(
            self.architecture,
            num_tokens=int(num_tokens),
            sum_squared_lengths=int(sum_squared),
            learned_tokens=result.learned_tokens,
        )
        tflops = flops / elapsed_s / self.device.world_size / 1e12
        peak = self.device.peak_tflops
        metrics = StepMetrics(
            step=step + 1,
            loss=result.loss,
            figures=result.figures,
            lr=result.lr,
            grad_norm=result.grad_norm,
            tokens_per_s=num_tokens / elapsed_s,
            tflops_per_device=tflops,
            mfu=None if peak is None else tflops / peak,
            memory_gib=self.device.memory_gib(),
            memory_used=self.device.memory_used(),
            num_tokens=int(num_tokens),
            learned_tokens=result.learned_tokens,
            padding=1 - num_tokens / places,
            step_time_s=elapsed_s,
            global_batch_size=self.batches.global_batch_size,
            consumed_sequences=(step + 1) * self.batches.global_batch_size,
            moe={} if result.load is None else result.load.figures(),
            loss_scale=result.loss_scale,
            skipped=result.skipped,
        )
        self.reporter.step(metrics)
        return metrics, stops > 0


def _sample_lengths(line: PackedLine) -> list[int]:
    """Tokens of each sample of a line; of its segments a last one of padding is none."""
    segments: list[int] = (line.cu_seqlens[1:] - line.cu_seqlens[:-1]).tolist()
    return segments[:-1] if line.num_tokens < line.input_ids.numel() else segments


def _due(every: int | None, done: int) -> bool:
    return bool(every) and done % (every or 1) == 0
