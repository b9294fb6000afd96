"""One rank of a run, from the first step to the exported model: read :meth:`Trainer.run` first."""

from __future__ import annotations

import math
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from isthmus.config.load import origins_of
from isthmus.config.schema import RunConfig
from isthmus.data.batching.batches import Batches, prefetched
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.data.batching.rollout_batches import PromptBatches
from isthmus.engine.checkpoint import save_load
from isthmus.engine.checkpoint.background_saves import Saves
from isthmus.engine.checkpoint.checkpoint_store import address_of
from isthmus.engine.checkpoint.checkpoint_writer import SaveOptions
from isthmus.engine.checkpoint.run_state import Progress
from isthmus.engine.generation.inference import Inference
from isthmus.engine.generation.schedule import Decoding
from isthmus.engine.parallel.process_groups import Position, gather_objects
from isthmus.engine.step import EvalResult, NotFinite, Stepper, StepResult
from isthmus.engine.trace_region import trace_region
from isthmus.errors import Diverged, IsthmusError, Preempted
from isthmus.launch.heartbeat import leave
from isthmus.recipes.data.eval_prompts import end_tokens
from isthmus.recipes.exports import Exports, exports_model, is_due
from isthmus.recipes.model.hf_export import checkpoint_args, write_checkpoint_config
from isthmus.recipes.model.rank_model import RankModel
from isthmus.recipes.plan.validation import RunContext
from isthmus.recipes.recipe import Recipe
from isthmus.recipes.rollout.rollout_state import RolloutState
from isthmus.recipes.rollout.rollouts import Rollouts
from isthmus.recipes.run_copies import RunCopies
from isthmus.recipes.run_dir import write_record
from isthmus.recipes.run_result import RunData, RunResult, describe
from isthmus.train.concurrent_save import ConcurrentSave
from isthmus.train.early_stopping import EarlyStopping
from isthmus.train.flops import flops_per_batch
from isthmus.train.grace_period import Abandoned, GracePeriod, preempted
from isthmus.train.metrics import StepMetrics
from isthmus.train.reporter import Reporter
from isthmus.train.row_file import first_valid_loss
from isthmus.train.skipped_steps import SkippedSteps
from isthmus.train.step_explainer import StepExplainer
from isthmus.train.watcher import Watcher


@dataclass(kw_only=True, slots=True)
class Trainer:
    """A rank that is ready to train; :func:`isthmus.recipes.build.build_trainer` makes it. Methods are collectives."""

    context: RunContext
    recipe: Recipe
    position: Position
    data: RunData
    model: RankModel
    stepper: Stepper
    reporter: Reporter
    start: int
    """Steps done before, by the run that is resumed."""
    record: Mapping[str, Any]
    """The run record; empty on other ranks than the first."""
    saves: Saves
    copies: RunCopies
    exports: Exports
    grace: GracePeriod
    early_stopping: EarlyStopping
    explainer: StepExplainer
    skipped_steps: SkippedSteps
    watchers: Sequence[Watcher]
    """All that attach to the events of steps, in the order in which they are called."""
    rollouts: Rollouts | None
    """What generates the answers that are trained on; None for a recipe that trains on data."""
    done: int = 0
    loss: float | None = None
    """Loss of step ``done``; None before the first."""
    _timed: tuple[float, float] = (0.0, 0.0)
    """Tokens and seconds of the steps after the first."""

    @property
    def config(self) -> RunConfig:
        return self.context.config

    @property
    def _continues(self) -> bool:
        """Whether a run of this folder is resumed."""
        resume = self.context.resume
        return resume is not None and (self.context.run_dir.is_own(resume) or self.copies.contains(resume))

    def run(self) -> RunResult:
        """Train, save, export and upload."""
        config, run_dir, best = self.config, self.context.run_dir, self.early_stopping.best
        self._begin()
        try:
            valid_before, valid_loss, test_loss = self.train()
            if config.checkpoint.save_final and self.start < self.done:
                self.save(self.done)
            self.saves.finish()
        finally:
            if self.rollouts is not None:
                self.rollouts.close()
            self.saves.close(config.checkpoint.grace_s)
            self.copies.close(config.checkpoint.grace_s)
        exported_step = self.done
        if config.checkpoint.keep_best and best.step is not None:
            valid_loss = best.loss
            if best.step != self.done:
                self.load_best()
                exported_step = best.step
        if config.checkpoint.export_final:
            self._export_final(exported_step)
        self.copies.remove()
        address = self.exports.push()
        first = first_valid_loss(run_dir.root / "metrics.jsonl")  # None on a machine without the run folder
        tokens, seconds = self._timed
        return RunResult(
            out=str(run_dir.root),
            model=str(run_dir.export()) if config.checkpoint.export_final and exports_model(config) else None,
            adapter=str(run_dir.adapter()) if config.checkpoint.export_final and config.lora.enabled else None,
            pushed=address,
            steps=self.done,
            loss=self.loss,
            valid_loss_before=valid_before if first is None else first,
            valid_loss=valid_loss,
            test_loss=test_loss,
            tokens_per_s=tokens / seconds if seconds else None,
            memory_gib=max(gather_objects(self.context.platform.memory_gib())),
        )

    def _begin(self) -> None:
        config, resume = self.config, self.context.resume
        self.done = self.start
        self.reporter.log(describe(self.context, self.data))
        settings = {name: value for name, value, _ in origins_of(config.model_dump(mode="json"), {})}
        self.reporter.begin(total_steps=self.data.steps, start=self.start, settings=settings)
        if resume is not None:
            address = address_of(resume)
            self.reporter.event(self.start, "resume", f"resumed from {address} at step {self.start}", path=address)
        profiled = config.train.profiled_steps
        if profiled and profiled[-1] <= self.start < self.data.steps:
            name = f"train.profile={config.train.profile}"
            self.reporter.log(f"{name}: these steps are done already; no step is profiled")

    def train(self) -> tuple[float | None, float | None, float | None]:
        """All steps; returns the validation loss before, if it is to be measured, and validation and test loss after.

        A stop request on any rank saves the state after the last complete step, and raises Preempted.
        """
        valid_before, eval_every = None, self.config.train.eval_every
        try:
            if self.start < self.data.steps and (not self._continues or is_due(eval_every, self.start)):
                valid_before = self.evaluate(self.start)
                if valid_before is not None and self.start and is_due(eval_every, self.start):
                    self.early_stopping.best.update(self.start, valid_before)  # if a stop request came before
            if self._continues and self.start < self.data.steps and self.exports.is_missing(self.start):
                self._export(self.start)
            self._train_steps()
            self.skipped_steps.check_updates(self.start, self.done)
            valid_loss, test_loss = self.evaluate(self.done), self.evaluate(self.done, "test")
            if valid_loss is not None and self.done == self.data.steps:
                self.early_stopping.best.update(self.done, valid_loss)
            return valid_before, valid_loss, test_loss
        except Abandoned as abandoned:
            done, part = abandoned.done, abandoned.part
        self._stop_watching()
        self.reporter.stopped(done, part)
        if done:
            self.save(done, wait=True)
            self.copies.remove()
        raise preempted(done, self.data.steps, part)

    def _train_steps(self) -> None:
        steps = self.data.steps
        with ExitStack() as stack:
            for watcher in self.watchers:
                stack.push(watcher.ended)
            batches = stack.enter_context(closing(self._batches(range(self.start, steps))))
            while self.done < steps and not self.early_stopping.stops(self.done):
                metrics, stop_requested = self.train_step(batches)
                if stop_requested:
                    self._stop_watching()
                for watcher in self.watchers:
                    watcher.step_finished(metrics)
                self.loss = metrics.loss
                if self.done > self.start + 1:
                    tokens, seconds = self._timed
                    self._timed = tokens + metrics.num_tokens, seconds + metrics.step_time_s
                if self.done < steps:
                    self._between_steps(stop_requested)

    def _batches(self, steps: range) -> Generator[Sequence[PackedBatch], None, None]:
        """This rank's micro batches of each step."""
        if self.rollouts is None:
            return prefetched(self.data.train.step, steps)
        return self.rollouts.batches(steps)

    def _stop_watching(self) -> None:
        for watcher in self.watchers:
            watcher.stopping()  # the checkpoint is not part of a step

    def train_step(self, batches: Iterator[Sequence[PackedBatch]]) -> tuple[StepMetrics, bool]:
        """The next step; returns its metrics, and whether any rank requested a stop."""
        step = self.done + 1
        with ExitStack() as contexts:
            for watcher in self.watchers:
                contexts.enter_context(watcher.context(step))
            contexts.enter_context(trace_region(f"step {step}"))
            started_s = time.monotonic()
            with trace_region("data"):
                micro_batches = next(batches)
            for watcher in self.watchers:
                watcher.step_started(step, micro_batches)
            watched: list[Sequence[float]] = []

            def host_numbers() -> list[float]:
                if concurrent_save is not None:
                    concurrent_save.before_update()
                watched[:] = [watcher.host_numbers(step) for watcher in self.watchers]
                saving = [float(self.grace.stop.requested), self.saves.ended(), self.copies.ended()]
                seconds = [time.monotonic() - started_s, self.saves.duration_s]
                return [*self._counts(micro_batches), *saving, *seconds, *(n for numbers in watched for n in numbers)]

            try:
                with self._concurrent_save(self.done) as concurrent_save:
                    check_stop = self.grace.before_micro_batch(self.done, len(micro_batches))
                    result = self.stepper.train_step(micro_batches, host_numbers, check_stop)
            except NotFinite as error:
                raise self.explainer.explained(step, micro_batches, error) from error
            tokens, squares, positions, stops, saves_ended, copies_ended, step_s, save_s, *sums = result.host_sums
            elapsed_s = time.monotonic() - started_s
            reported: dict[str, float] = {}
            for watcher, numbers in zip(self.watchers, watched, strict=True):
                reported |= watcher.metrics(step, sums[: len(numbers)])
                del sums[: len(numbers)]
            padding = 1 - tokens / positions
            metrics = self._metrics(step, result, int(tokens), int(squares), padding, elapsed_s, reported)
            self.reporter.step(metrics)
            if self.rollouts is not None:
                self.rollouts.check_logps(step, result.peak)
            ranks = self.context.plan.world_size
            if saves_ended >= ranks:
                self.saves.conclude()
            if copies_ended >= ranks:
                self.copies.conclude()
            self.grace.step_s, self.grace.save_s = step_s / ranks, save_s / ranks
            self.done = step
        return metrics, stops > 0

    def _counts(self, batches: Sequence[PackedBatch]) -> list[float]:
        """Tokens, their squared sample lengths, and positions with padding; zero on ranks that share the batches."""
        if self.position.tp_rank or self.position.pp_rank or self.position.cp_rank:
            return [0.0, 0.0, 0.0]
        lengths = [length for batch in batches for length in batch.sample_lengths]
        positions = sum(sum(batch.lengths) for batch in batches)
        return [float(sum(lengths)), float(sum(length**2 for length in lengths)), float(positions)]

    def _metrics(
        self,
        step: int,
        result: StepResult,
        num_tokens: int,
        squared_lengths: int,
        padding: float,
        elapsed_s: float,
        reported: Mapping[str, float],
    ) -> StepMetrics:
        plan, platform, batch_size = self.context.plan, self.context.platform, self.data.train.global_batch_size
        flops = flops_per_batch(plan.architecture, num_tokens, squared_lengths, result.loss_tokens)
        if plan.teacher is not None:  # has no backward pass
            flops += flops_per_batch(plan.teacher.architecture, num_tokens, squared_lengths, result.loss_tokens) / 3
        tflops = flops / elapsed_s / plan.world_size / 1e12
        peak = platform.peak_tflops(self.context.precision)
        return StepMetrics(
            step=step,
            loss=result.loss,
            objective={**({} if self.rollouts is None else self.rollouts.metrics(step)), **result.metrics},
            rollout={} if self.rollouts is None else self.rollouts.present_metrics,
            lr=result.lr,
            grad_norm=result.grad_norm,
            tokens_per_s=num_tokens / elapsed_s,
            tflops_per_device=tflops,
            mfu=None if peak is None else tflops / peak,
            memory_gib=platform.memory_gib(),
            memory_used=platform.memory_used() if self.config.logging.style == "megatron" else None,
            num_tokens=num_tokens,
            loss_tokens=result.loss_tokens,
            padding=padding,
            step_time_s=elapsed_s,
            global_batch_size=batch_size,
            consumed_sequences=step * batch_size,
            epoch=None if self.config.data.mock else step * batch_size / self.data.train.sequences_per_epoch,
            moe={} if result.load is None else result.load.metrics(),
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            ranks=reported,
        )

    def _between_steps(self, stop_requested: bool) -> None:
        checkpoint, improved = self.config.checkpoint, False
        if is_due(self.config.train.eval_every, self.done) and (loss := self.evaluate(self.done)) is not None:
            improved = self.early_stopping.best.update(self.done, loss)
        if is_due(checkpoint.hf_every, self.done):
            self._export(self.done)
        if stop_requested:
            raise Abandoned(self.done)
        if is_due(checkpoint.every, self.done) or (improved and checkpoint.keep_best):
            self.save(self.done)
        elif is_due(checkpoint.memory_every, self.done):
            with trace_region("copy in memory"):
                self.copies.save(self.stepper, *self._saved(self.done, in_memory=True))

    def _export(self, done: int) -> None:
        try:
            self.exports.export(done)
        except Preempted:
            raise Abandoned(done, "an export") from None

    def _export_final(self, step: int) -> None:
        try:
            self.exports.export(step, final=True)
        except Preempted:
            if step == self.done:
                self.save(step, wait=True)
            raise

    def evaluate(self, step: int, part: Literal["valid", "test"] = "valid") -> float | None:
        """Report the validation or test loss; None without such data."""
        if part == "valid":
            self.generate_samples(step)
        source = self.data.valid if part == "valid" else self.data.test
        if source is None:
            return None
        with trace_region("validation"):
            result = self._evaluate(source, step)
        self.reporter.evaluation(step, result.loss, result.metrics, part=part)
        if not math.isfinite(result.loss):
            name = "validation" if part == "valid" else "test"
            hint = "Lower optim.lr or lengthen optim.warmup_steps." if step else "Check the weights and the data."
            raise Diverged(f"the {name} loss is {result.loss} after {step} steps; this state is not saved. {hint}")
        return result.loss

    def _evaluate(self, source: Batches, step: int) -> EvalResult:
        if isinstance(source, PromptBatches):
            assert self.rollouts is not None
            return self.rollouts.evaluate(step, source)
        objective = None if self.recipe.eval_objective is None else self.recipe.eval_objective()
        return self.stepper.evaluate(self.grace.evaluated(source.eval_batches(), step), objective)

    def generate_samples(self, step: int) -> None:
        """Report answers to the prompts of ``eval.generate`` after ``step``."""
        context, plan = self.context, self.context.plan
        if not context.prompts:
            return
        config, tokenizer = context.config, context.tokenizer
        tokens = config.train.micro_batch_size * config.data.seq_length
        inference = Inference(self.stepper, plan.architecture, plan.parallel, batch_tokens=tokens)
        settings, ends = config.eval, end_tokens(plan.source, tokenizer)
        decoding = Decoding(settings.max_new_tokens, ends, settings.temperature, config.train.seed)
        with trace_region("sample answers"):
            answers = inference.generate([prompt.input_ids for prompt in context.prompts], decoding)
        texts = [tokenizer.decode(answer, skip_special_tokens=True) for answer in answers]
        prompts = (prompt.text for prompt in context.prompts)
        self.reporter.answers(step, list(zip(prompts, texts, strict=True)))

    def save(self, step: int, *, wait: bool = False) -> None:
        """Write a checkpoint; ``wait`` until it is published. See :meth:`Saves.save`."""
        with trace_region("checkpoint"):
            self.saves.save(self.stepper, *self._saved(step), wait=wait)

    def _saved(self, step: int, *, in_memory: bool = False) -> tuple[Progress, SaveOptions]:
        settings = self.config.checkpoint
        state = None if self.rollouts is None else self.rollouts.state(step)
        options = SaveOptions(
            keep=settings.keep,
            keep_best=settings.keep_best,
            args=checkpoint_args(self.model, step),
            more_state={} if self.rollouts is None or state is None else self.rollouts.planned_weights(state),
            write_beside=partial(self._write_resume_files if in_memory else self._write_files, state),
        )
        return Progress(step=step, data=self.data.fingerprint, best=self.early_stopping.best), options

    def _write_files(self, rollouts: RolloutState | None, folder: Path) -> None:
        """What a checkpoint has besides the state; the rows of its steps are on the disk before it is published."""
        self._write_resume_files(rollouts, folder)
        write_checkpoint_config(self.model, folder, self.context.tokenizer)

    def _write_resume_files(self, rollouts: RolloutState | None, folder: Path) -> None:
        self.reporter.sync()
        if rollouts is not None:
            rollouts.write(folder)
        write_record(folder, self.record)

    def _concurrent_save(self, done: int) -> AbstractContextManager[ConcurrentSave | None]:
        """The context of the step after ``done`` others: it saves the state if the step is too long after a stop."""
        dequantized = self.config.optim.optimizer == "adamw_8bit"  # a copy of the state for each save
        if not self.grace.has_stages or self.grace.fits_step or dequantized:
            return nullcontext()
        part = f"step {done + 1}"
        group, write = self.saves.prepare(self.stepper, *self._saved(done))

        def save() -> None:
            self.reporter.stopped(done, part)
            if done:
                write()

        def leave_with(failure: IsthmusError | None) -> NoReturn:
            leave(preempted(done, self.data.steps, part) if failure is None else failure)

        return ConcurrentSave(group, is_late=self.grace.late_in_step(), save=save, leave=leave_with)

    def load_best(self) -> None:
        """Load the weights with the lowest validation loss."""
        best = self.early_stopping.best
        save_load.load(self.context.run_dir.checkpoint(best.step or 0), self.stepper, self.context.plan.parallel)
        self.reporter.log(f"best: step {best.step}, validation loss {best.loss:.4f}")
