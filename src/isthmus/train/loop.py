"""The training loop: train and report steps; evaluate, export and save at intervals; stop on request."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, replace
from typing import Literal

from isthmus.config.schema import RunConfig
from isthmus.data.batching.batches import Batches, prefetched
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.checkpoint.background_saves import Saves
from isthmus.engine.checkpoint.run_state import BestLoss
from isthmus.engine.loss.objective import Objective
from isthmus.engine.parallel.process_groups import Position
from isthmus.engine.step import NotFinite, Stepper, StepResult
from isthmus.engine.trace_region import trace_region
from isthmus.errors import Diverged, Preempted
from isthmus.families.architecture import Architecture
from isthmus.platforms.base import Platform
from isthmus.train.flops import flops_per_batch
from isthmus.train.grace_period import Abandoned, GracePeriod, preempted
from isthmus.train.metrics import StepMetrics
from isthmus.train.rank_reports import RankReports
from isthmus.train.reporter import Reporter
from isthmus.train.save_beside_step import SaveBesideStep
from isthmus.train.step_explainer import StepExplainer
from isthmus.train.step_profile import StepProfile


@dataclass(frozen=True, slots=True)
class RunData:
    train: Batches
    valid: Batches | None
    test: Batches | None
    steps: int
    fingerprint: str
    """Equal for two runs whose step k has the same sequences."""


@dataclass(frozen=True, slots=True)
class Outcome:
    last_step: int
    last_loss: float | None
    valid_loss: float | None
    test_loss: float | None
    tokens_per_s: float | None
    """Without the first step, which warms up."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Loop:
    """The steps of one rank."""

    stepper: Stepper
    data: RunData
    config: RunConfig
    architecture: Architecture
    teacher: Architecture | None
    """Of distillation."""
    platform: Platform
    precision: str
    position: Position
    world_size: int
    reporter: Reporter
    profile: StepProfile
    explainer: StepExplainer
    ranks: RankReports
    best: BestLoss
    eval_objective: Objective | None
    """None: that of training."""
    answer: Callable[[int], None]
    """Report answers to ``eval.prompts``."""
    save: Callable[..., None]
    """Of the state after a step; ``wait=True`` returns when it is published."""
    saves: Saves
    beside: Callable[[int], AbstractContextManager[SaveBesideStep | None]]
    """Around a step that pipeline stages cannot abandon: saves the state after so many steps if the step takes too
    long after a stop request."""
    export: Callable[[int], None]
    grace: GracePeriod

    def evaluate(self, step: int, part: Literal["valid", "test"] = "valid") -> float | None:
        """Report the validation or test loss; None without such data."""
        if part == "valid":
            self.answer(step)
        source = self.data.valid if part == "valid" else self.data.test
        if source is None:
            return None
        with trace_region("validation"):
            batches = self.grace.evaluated(source.eval_batches(), step)
            result = self.stepper.evaluate(batches, self.eval_objective)
        self.reporter.evaluation(step, result.loss, result.metrics, part=part)
        if not math.isfinite(result.loss):
            name = "validation" if part == "valid" else "test"
            hint = "Lower optim.lr or lengthen optim.warmup_steps." if step else "Check the weights and the data."
            raise Diverged(f"the {name} loss is {result.loss} after {step} steps; this state is not saved. {hint}")
        return result.loss

    def run(self, start: int, *, evaluates_first: bool, exports_first: bool) -> tuple[float | None, Outcome]:
        """Train from step ``start``; returns the validation loss before, if it is to be measured, and the outcome.

        A stop request on any rank saves the state after the last complete step, and raises Preempted.
        """
        try:
            before = self.evaluate(start) if evaluates_first else None
            if before is not None and start and is_due(self.config.train.eval_every, start):
                self.best.update(start, before)  # if a stop request came before
            if exports_first:
                self._export(start)
            return before, self._run(start)
        except Abandoned as abandoned:
            done, part = abandoned.done, abandoned.part
        self.profile.finish()  # the checkpoint is not part of a step
        self.reporter.stopped(done, part)
        if done:
            self.save(done, wait=True)
        raise preempted(done, self.data.steps, part)

    def _run(self, start: int) -> Outcome:
        steps = self.data.steps
        loss: float | None = None
        done, tokens, seconds = start, 0.0, 0.0
        skipped, retries = self.stepper.skipped, self.platform.memory_retries()
        with self.profile, closing(prefetched(self.data.train.step, range(start, steps))) as batches:
            for step in range(start, steps):
                if self._stops_early(step):
                    break
                done = step + 1
                with self.profile.around(step + 1), trace_region(f"step {step + 1}"), self.ranks.around(step + 1):
                    metrics, stop_requested = self._step(step, batches)
                if stop_requested:
                    self.profile.finish()  # the checkpoint is not part of a step
                loss, before, retries = metrics.loss, retries, self.platform.memory_retries()
                if warning := memory_warning(before, retries):
                    self.reporter.event(done, "memory full", warning)
                if step > start:
                    tokens, seconds = tokens + metrics.num_tokens, seconds + metrics.step_time_s
                if step + 1 < steps:
                    self._between_steps(step + 1, stop_requested)
        self._check_updates(start, done, skipped)
        valid_loss, test_loss = self.evaluate(done), self.evaluate(done, "test")
        if valid_loss is not None and done == steps:
            self.best.update(done, valid_loss)
        return Outcome(done, loss, valid_loss, test_loss, tokens / seconds if seconds else None)

    def _stops_early(self, done: int) -> bool:
        patience, best = self.config.train.early_stopping, self.best
        if patience is None or best.evaluations_since < patience:
            return False
        text = (
            f"stopped early: {best.evaluations_since} validations in a row were not below {best.loss:.4f}, the loss of "
            f"step {best.step} (train.early_stopping={patience})"
        )
        self.reporter.event(done, "early stop", text)
        return True

    def _check_updates(self, start: int, steps: int, skipped: int) -> None:
        """Raise Diverged if all steps from ``start`` to ``steps``, with ``skipped`` skipped before, were skipped."""
        scale = self.stepper.loss_scale
        if start < steps and self.stepper.skipped - skipped == steps - start:
            raise Diverged(
                f"none of the steps {start + 1} to {steps} changed the weights: each gradient overflowed in float16, "
                f"and halved the loss scale, now {scale:g}; nothing is exported. Set train.initial_loss_scale to that "
                "or less, raise train.steps, or use train.precision=bf16."
            )

    def _between_steps(self, done: int, stop_requested: bool) -> None:
        checkpoint, improved = self.config.checkpoint, False
        if is_due(self.config.train.eval_every, done) and (loss := self.evaluate(done)) is not None:
            improved = self.best.update(done, loss)
        if is_due(checkpoint.hf_every, done):
            self._export(done)
        if stop_requested:
            raise Abandoned(done)
        if is_due(checkpoint.every, done) or (improved and checkpoint.keep_best):
            self.save(done)

    def _export(self, done: int) -> None:
        try:
            self.export(done)
        except Preempted:
            raise Abandoned(done, "an export") from None

    def _step(self, step: int, batches: Iterator[Sequence[PackedBatch]]) -> tuple[StepMetrics, bool]:
        """Returns the metrics, and whether any rank requested a stop."""
        started_s = time.monotonic()
        with trace_region("data"):
            micro_batches = next(batches)
        lengths = [length for micro_batch in micro_batches for length in micro_batch.sample_lengths]
        padded_length = sum(sum(micro_batch.lengths) for micro_batch in micro_batches)
        own = [sum(lengths), sum(length**2 for length in lengths), padded_length]
        counts = self.position.tp_rank == self.position.pp_rank == self.position.cp_rank == 0
        self.explainer.watch(step + 1, micro_batches)

        def host_numbers() -> list[float]:
            if beside is not None:
                beside.before_update()
            return [
                *(float(number) if counts else 0.0 for number in own),
                float(self.grace.stop.requested),
                self.saves.ended(),
                time.monotonic() - started_s,
                self.saves.duration_s,
                *self.ranks.numbers(step + 1),
            ]

        try:
            with self.beside(step) as beside:
                result = self.stepper.train_step(
                    micro_batches, host_numbers, self.grace.between_micro_batches(step, len(micro_batches))
                )
        except NotFinite as error:
            raise self.explainer.explained(step + 1, micro_batches, error) from error
        num_tokens, sum_squared, num_positions, stops, saves_ended, *seconds = result.host_sums[:7]
        elapsed_s = time.monotonic() - started_s
        padding = 1 - num_tokens / num_positions
        metrics = self._metrics(step, result, int(num_tokens), int(sum_squared), padding, elapsed_s)
        self.reporter.step(replace(metrics, ranks=self.ranks.report(step + 1, result.host_sums[7:])))
        self._follow_saves(saves_ended, *seconds)
        self._report_skip(step + 1)
        return metrics, stops > 0

    def _report_skip(self, step: int) -> None:
        """Record that a float16 gradient overflowed in ``step``, and warn if that repeats."""
        row = self.stepper.skipped_in_a_row
        if not row:
            return
        text = (
            f"warning: {row} step{'s' * (row > 1)} in a row did not change the weights: float16 overflowed. "
            f"The loss scale is now {self.stepper.loss_scale:g}, half after each; see train.initial_loss_scale."
        )
        warns = row >= 4 and row.bit_count() == 1
        self.reporter.event(step, "skipped step", text, prints=warns, loss_scale=self.stepper.loss_scale)

    def _follow_saves(self, saves_ended: float, step_s: float, save_s: float) -> None:
        """Report a save that has ended on all ranks, or failed on one. The arguments are sums over ranks."""
        if saves_ended >= self.world_size:
            self.saves.conclude()
        self.grace.step_s, self.grace.save_s = step_s / self.world_size, save_s / self.world_size

    def _metrics(
        self, step: int, result: StepResult, num_tokens: int, sum_squared_lengths: int, padding: float, elapsed_s: float
    ) -> StepMetrics:
        flops = flops_per_batch(self.architecture, num_tokens, sum_squared_lengths, result.loss_tokens)
        if self.teacher is not None:  # has no backward pass
            flops += flops_per_batch(self.teacher, num_tokens, sum_squared_lengths, result.loss_tokens) / 3
        tflops = flops / elapsed_s / self.world_size / 1e12
        peak = self.platform.peak_tflops(self.precision)
        return StepMetrics(
            step=step + 1,
            loss=result.loss,
            objective=result.metrics,
            lr=result.lr,
            grad_norm=result.grad_norm,
            tokens_per_s=num_tokens / elapsed_s,
            tflops_per_device=tflops,
            mfu=None if peak is None else tflops / peak,
            memory_gib=self.platform.memory_gib(),
            memory_used=self.platform.memory_used() if self.config.logging.style == "megatron" else None,
            num_tokens=num_tokens,
            loss_tokens=result.loss_tokens,
            padding=padding,
            step_time_s=elapsed_s,
            global_batch_size=self.data.train.global_batch_size,
            consumed_sequences=(step + 1) * self.data.train.global_batch_size,
            moe={} if result.load is None else result.load.metrics(),
            loss_scale=result.loss_scale,
            skipped=result.skipped,
        )


def is_due(every: int | None, done: int) -> bool:
    """Whether something that happens every ``every`` steps does after ``done`` steps."""
    return bool(every) and done % (every or 1) == 0


def memory_warning(before: int, now: int) -> str | None:
    """A line when the number of :meth:`isthmus.platforms.base.Platform.memory_retries` passes a power of two."""
    if now.bit_length() <= before.bit_length():
        return None
    return (
        f"warning: GPU memory was full {now} times so far. torch then waits for the GPU, returns unused memory and "
        "tries again, which is slow. Lower train.micro_batch_size or data.seq_length, raise parallel.tp, or set "
        "train.recompute=full."
    )
