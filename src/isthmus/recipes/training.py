"""One rank that is ready to train, and what it writes: checkpoints, exports, answers."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from isthmus.config.schema import RunConfig
from isthmus.engine.checkpoint import save_load
from isthmus.engine.checkpoint.background_saves import Saves
from isthmus.engine.checkpoint.checkpoint_folder import checkpoint_dir
from isthmus.engine.checkpoint.checkpoint_writer import SaveOptions
from isthmus.engine.checkpoint.run_state import BestLoss, Progress
from isthmus.engine.inference import Decoding, Inference
from isthmus.engine.parallel.process_groups import Position, on_rank_0, sum_over_ranks
from isthmus.engine.step import Stepper
from isthmus.engine.trace_region import trace_region
from isthmus.errors import IsthmusError, Preempted, disk_errors
from isthmus.files.atomic_write import write_atomic
from isthmus.hf.hub import push
from isthmus.launch.heartbeat import leave
from isthmus.recipes.data.eval_prompts import end_tokens
from isthmus.recipes.model.adapter_export import export_adapter
from isthmus.recipes.model.hf_export import checkpoint_args, export_hf, write_checkpoint_config
from isthmus.recipes.model.rank_model import RankModel
from isthmus.recipes.model_card import model_card
from isthmus.recipes.plan.model_plan import ModelPlan
from isthmus.recipes.plan.parameter_counts import num_parameters
from isthmus.recipes.plan.validation import RunContext
from isthmus.recipes.run_dir import write_record
from isthmus.train.grace_period import GracePeriod, preempted
from isthmus.train.loop import RunData, is_due
from isthmus.train.reporter import Reporter
from isthmus.train.save_beside_step import SaveBesideStep


def exports_model(config: RunConfig) -> bool:
    """Whether an export has the whole model."""
    return config.checkpoint.export_merged or not config.lora.enabled


def describe(context: RunContext, data: RunData) -> str:
    """Steps, epochs, tokens of a step and parameters."""
    epochs = f"{data.steps * data.train.global_batch_size / data.train.sequences_per_epoch:.3g} epochs"
    return (
        f"training: {data.steps} steps, {'random tokens' if context.config.data.mock else epochs}, "
        f"{data.train.tokens_per_step:,.0f} tokens per step; {describe_parameters(context.plan)}"
    )


def describe_parameters(plan: ModelPlan) -> str:
    total, trained = (num_parameters(plan.family, plan.architecture, frozen) for frozen in ((), plan.frozen))
    trained += 0 if plan.adapters is None else plan.adapters.num_parameters
    return f"{total:,} parameters, {trained:,} trainable"


@dataclass(frozen=True, slots=True)
class Training:
    """One rank, ready for the first step."""

    context: RunContext
    position: Position
    data: RunData
    model: RankModel
    stepper: Stepper
    reporter: Reporter
    start: int
    """Steps done before, by the run that is resumed."""
    best: BestLoss
    record: Mapping[str, Any]
    """The run record; empty on other ranks than the first."""
    saves: Saves
    grace: GracePeriod

    def save(self, step: int, *, wait: bool = False) -> None:
        """Write a checkpoint; a collective. See :meth:`Saves.save`."""
        with trace_region("checkpoint"):
            self.saves.save(self.stepper, *self._saved(step), wait=wait)

    def _saved(self, step: int) -> tuple[Progress, SaveOptions]:
        settings = self.context.config.checkpoint
        options = SaveOptions(
            keep=settings.keep,
            keep_best=settings.keep_best,
            args=checkpoint_args(self.model, step),
            write_beside=self._write_beside,
        )
        return Progress(step=step, data=self.data.fingerprint, best=self.best), options

    def beside(self, done: int) -> AbstractContextManager[SaveBesideStep | None]:
        """Around the step after ``done`` others: what saves the state if the step is too long after a stop request."""
        dequantized = self.context.config.optim.optimizer == "adamw_8bit"  # a copy of the state for each save
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

        return SaveBesideStep(group, is_late=self.grace.late_in_step(), save=save, leave=leave_with)

    def _write_beside(self, folder: Path) -> None:
        """What a checkpoint has besides the state; the rows of its steps are on the disk before it is published."""
        self.reporter.sync()
        write_checkpoint_config(self.model, folder, self.context.tokenizer)
        write_record(folder, self.record)

    def export(self, step: int, *, final: bool = False) -> None:
        """Write the Hugging Face folder of the state after ``step``; a collective.

        Raises Preempted if it does not end within the first half of the grace period of a stop request.
        """
        context = self.context
        named = context.config.model.export_dtype
        dtype = None if named == "source" else getattr(torch, named)
        which = None if final else step
        if context.plan.adapters is not None:
            path = context.run_dir.adapter(which)
            with trace_region("export"):
                export_adapter(self.model, context.config, path)
                self._write_card(path, step, adapter=True)
            self.reporter.exported(step, path)
            if not exports_model(context.config):
                return
        path = context.run_dir.export(which)
        with trace_region("export"):
            export_hf(self.model, path, context.tokenizer, dtype=dtype, replace=True, check=self._check_stop)
            self._write_card(path, step)
        self.reporter.exported(step, path)

    def lacks_export(self, step: int) -> bool:
        """Whether an export is due after ``step`` and missing, because of a stop request; a collective."""
        config, run_dir = self.context.config, self.context.run_dir
        if not is_due(config.checkpoint.hf_every, step):
            return False
        due = [run_dir.adapter(step)] if config.lora.enabled else []
        due += [run_dir.export(step)] if exports_model(config) else []
        missing = self.position.rank == 0 and not all(folder.exists() for folder in due)
        return sum_over_ranks([float(missing)], self.stepper.device) != [0.0]

    def _check_stop(self) -> None:
        if self.grace.half_over:
            raise Preempted("stopped in an export, as requested. The same command resumes from the last checkpoint.")

    def _write_card(self, folder: Path, step: int, *, adapter: bool = False) -> None:
        if self.position.rank == 0:
            context, data = self.context, self.data.train
            metrics = context.run_dir.root / "metrics.jsonl"
            card = model_card(context.config, context.plan, data, metrics, step, adapter=adapter)
            with disk_errors(folder):
                write_atomic(folder / "README.md", card)

    def push(self) -> str | None:
        """Upload the final export; a collective. Returns the address, on rank 0 only."""
        repo, config = self.context.config.checkpoint.push, self.context.config
        if repo is None:
            return None
        run_dir, private = self.context.run_dir, not config.checkpoint.push_public
        folders = {".": run_dir.export()} if exports_model(config) else {}
        if config.lora.enabled:
            folders["adapter" if folders else "."] = run_dir.adapter()
        address: list[str] = []
        on_rank_0(lambda: address.append(push(folders, repo, private=private, report=self.reporter.log)), "push")
        return next(iter(address), None)

    def answer(self, step: int) -> None:
        """Report answers to the prompts of ``eval.generate`` after ``step``; a collective."""
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

    def load_best(self) -> None:
        """Load the weights with the lowest validation loss; a collective."""
        folder = checkpoint_dir(self.context.run_dir.checkpoints, self.best.step or 0)
        save_load.load(folder, self.stepper, self.context.plan.parallel)
        self.reporter.log(f"best: step {self.best.step}, validation loss {self.best.loss:.4f}")
