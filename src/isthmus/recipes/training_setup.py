"""Load the data, build model and optimizer, and resume."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

from isthmus.config.load import dump
from isthmus.engine.checkpoint import save_load
from isthmus.engine.checkpoint.background_saves import Saves
from isthmus.engine.checkpoint.checkpoint_folder import checkpoint_dir, remove_old
from isthmus.engine.checkpoint.run_state import Progress
from isthmus.engine.optim.learning_rate import build_schedule
from isthmus.engine.optim.optimizer import build_optimizer
from isthmus.engine.parallel.process_groups import Position, agree, on_rank_0
from isthmus.engine.step import Stepper
from isthmus.engine.trace_region import trace_region
from isthmus.errors import UsageError
from isthmus.recipes.data.corpus import Corpus, check_fingerprint, load_corpus, pads_to_one_length
from isthmus.recipes.data.data_notes import data_notes
from isthmus.recipes.data.data_sources import Report
from isthmus.recipes.data.first_records import check_first_records
from isthmus.recipes.model.model_source import answer_end
from isthmus.recipes.model.rank_model import build_rank_model
from isthmus.recipes.model.teacher_model import build_teacher
from isthmus.recipes.plan.model_plan import check_best, check_profiled_steps, check_schedule
from isthmus.recipes.plan.resume_check import checked_record
from isthmus.recipes.plan.run_record import run_environment
from isthmus.recipes.plan.validation import RunContext
from isthmus.recipes.reference_logps import compute_reference
from isthmus.recipes.registry import recipe_of
from isthmus.recipes.training import Training
from isthmus.train.grace_period import GracePeriod
from isthmus.train.loop import RunData
from isthmus.train.reporter import Reporter
from isthmus.train.stop import StopFlag


def set_up(context: RunContext, position: Position, reporter: Reporter, stop: StopFlag) -> Training:
    """Load the data, build model and optimizer, resume. A failure removes a new run folder."""
    config, run_dir, main = context.config, context.run_dir, position.rank == 0
    recipe = recipe_of(config)
    text, record = dump(config), dict[str, Any]()
    on_rank_0(lambda: record.update(_checked_record(context, reporter)), "run record")
    checks = ExitStack()
    agree(lambda: checks.enter_context(run_dir.checking(text)) if main else None)
    with checks:
        with trace_region("data preparation"):
            data = _load_data(context, position, reporter, stop)
        check_schedule(config, data.steps)
        check_best(config, has_validation=data.valid is not None)
        with trace_region("loading the model"):
            model = build_rank_model(config, context.plan, context.platform, position, context.precision)
        for message in model.messages:
            reporter.log(message)
        optimizer = build_optimizer(model.stages, config.optim, config.train, family=context.plan.family)
        schedule = build_schedule(optimizer, config.optim, data.steps)
        with trace_region("loading the teacher"):
            teacher = build_teacher(config, context.plan, context.platform, position, context.precision)
        stepper = Stepper(model.stages, optimizer, schedule, recipe.objective(config), teacher)
        if recipe.has_reference(config):
            parts = {"train": data.train, "valid": data.valid, "test": data.test}
            fresh = context.resume is None
            compute_reference(stepper, parts, run_dir.reference, position, fresh=fresh, stop=stop, log=reporter.log)
        progress = _resume(context, stepper, data)
        check_profiled_steps(config, data.steps)
        record |= {"data": data.fingerprint} if main else {}
        agree(lambda: _begin(context, record) if main else None)
    saves = Saves(
        run_dir.checkpoints,
        context.plan.parallel,
        asynchronous=config.checkpoint.asynchronous,
        saved=reporter.saved,
        log=reporter.log,
    )
    saves.last_step = progress.step if context.resume == checkpoint_dir(run_dir.checkpoints, progress.step) else None
    if main and saves.last_step is not None and config.checkpoint.resume == "auto":  # a kill may have prevented it
        best_step = progress.best.step if config.checkpoint.keep_best else None
        remove_old(run_dir.checkpoints, progress.step, config.checkpoint.keep, best_step)
    has_stages = context.plan.parallel.pp > 1
    if has_stages and config.optim.optimizer == "adamw_8bit":
        reporter.log(
            "optim.optimizer=adamw_8bit with parallel.pp: after a stop request the run saves when its step has ended, "
            f"also if that takes longer than checkpoint.grace_s={config.checkpoint.grace_s:g}"
        )
    grace = GracePeriod(stop, config.checkpoint.grace_s, stepper.device, has_stages)
    start, best = progress.step, progress.best
    return Training(context, position, data, model, stepper, reporter, start, best, record, saves, grace)


def _begin(context: RunContext, record: dict[str, Any]) -> None:
    environment = run_environment(context)
    context.run_dir.begin(dump(context.config), record, fresh=context.resume is None, environment=environment)


def _checked_record(context: RunContext, reporter: Reporter) -> dict[str, Any]:
    """The run record, and the checks before anything is tokenized that one rank does for all."""
    record, messages = checked_record(context)
    if context.resume is None:  # else the data is tokenized already
        check_first_records(context.config, context.tokenizer)
    for message in messages:
        reporter.log(message)
    return record


def _load_data(context: RunContext, position: Position, reporter: Reporter, stop: StopFlag) -> RunData:
    corpus = load_corpus(
        context.config,
        context.run_dir.data,
        context.tokenizer,
        vocab_size=context.plan.architecture.vocab_size,
        resume=context.resume,
        stop=stop,
        report=reporter.log,
    )
    return run_data(context, corpus, position, reporter.log)


def run_data(context: RunContext, corpus: Corpus, position: Position, report: Report) -> RunData:
    """The batches of a rank and the number of steps."""
    config, plan = context.config, context.plan
    dp, eod = config.parallel.dp(plan.world_size), context.tokenizer.eos_id
    device_type = context.platform.device_type
    end = answer_end(plan.source.config, context.tokenizer) if plan.architecture.score_head else None
    train, valid, test = corpus.batches(config, position, dp, eod=eod, device_type=device_type, end=end)
    if config.parallel.pp > 1 and device_type == "cuda" and not pads_to_one_length(config, device_type):
        why = "data.packing=false" if not config.data.packing else "moe.capacity_factor is set"
        report(f"pipeline: stages exchange the length of each micro batch, because {why}")
    steps = config.train.steps or math.ceil((config.train.epochs or 1) * train.steps_per_epoch)
    if corpus.mixture:
        epochs = ", ".join(f"{name} {epochs:.2f}" for name, epochs in train.epochs(steps).items())
        report(f"epochs of each set in {steps} steps: {epochs}")
    for note in data_notes(config, plan.architecture, train, steps):
        report(f"note: {note}")
    return RunData(train, valid, test, steps, corpus.fingerprint(config))


def _resume(context: RunContext, stepper: Stepper, data: RunData) -> Progress:
    """The progress of the loaded checkpoint, or step 0."""
    if context.resume is None:
        return Progress(step=0, data=data.fingerprint)
    with trace_region("loading the checkpoint"):
        progress = save_load.load(context.resume, stepper, context.plan.parallel)
    check_fingerprint(progress.data, data.fingerprint, context.resume)
    if progress.step > data.steps:
        raise UsageError(
            f"{context.resume} is at step {progress.step}, beyond this run's {data.steps} steps. Raise train.steps."
        )
    return progress
