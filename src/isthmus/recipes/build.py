"""From a validated config to a :class:`~isthmus.recipes.trainer.Trainer`: data, model, optimizer, resumed state."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from isthmus.config.load import dump
from isthmus.data.batching.rollout_batches import PromptBatches
from isthmus.engine.checkpoint import save_load
from isthmus.engine.checkpoint.background_saves import Saves
from isthmus.engine.checkpoint.checkpoint_folder import remove_old
from isthmus.engine.checkpoint.run_state import Progress
from isthmus.engine.optim.learning_rate import build_schedule
from isthmus.engine.optim.optimizer import build_optimizer, memory_stats
from isthmus.engine.parallel.live_parameters import live_tensors
from isthmus.engine.parallel.process_groups import Position, agree, gather_objects, on_rank_0
from isthmus.engine.step import Stepper
from isthmus.engine.trace_region import trace_region
from isthmus.errors import UsageError, counted
from isthmus.recipes.data.corpus import Corpus, check_fingerprint, load_corpus, pads_to_one_length
from isthmus.recipes.data.data_notes import data_notes, split_note
from isthmus.recipes.data.data_sources import Report, data_settings, find_data_sources
from isthmus.recipes.data.default_batch import default_batch_size, total_steps, with_batch_size
from isthmus.recipes.data.first_records import check_first_records
from isthmus.recipes.exports import Exports
from isthmus.recipes.model.model_source import answer_end
from isthmus.recipes.model.rank_model import RankModel, build_rank_model
from isthmus.recipes.model.teacher_model import build_teacher
from isthmus.recipes.plan.model_plan import check_best, check_profiled_steps, check_schedule
from isthmus.recipes.plan.prefix_sharing import shares_prefixes
from isthmus.recipes.plan.resume_check import checked_record
from isthmus.recipes.plan.run_record import run_environment
from isthmus.recipes.plan.validation import RunContext
from isthmus.recipes.reference_logps import compute_reference
from isthmus.recipes.registry import recipe_of
from isthmus.recipes.rollout.build_rollouts import build_rollouts
from isthmus.recipes.run_copies import RunCopies
from isthmus.recipes.run_result import RunData
from isthmus.recipes.trainer import Trainer
from isthmus.train.early_stopping import EarlyStopping
from isthmus.train.grace_period import GracePeriod
from isthmus.train.memory_warnings import MemoryWarnings
from isthmus.train.rank_reports import RankReports
from isthmus.train.reporter import Reporter
from isthmus.train.skipped_steps import SkippedSteps
from isthmus.train.step_explainer import StepExplainer
from isthmus.train.step_profile import StepProfile
from isthmus.train.stop import StopFlag


def build_trainer(context: RunContext, position: Position, reporter: Reporter, stop: StopFlag) -> Trainer:
    """Load the data, build model and optimizer, resume; a collective. A failure removes a new run folder."""
    copies = RunCopies.open(context, reporter, main=position.rank == 0)
    context = copies.resumed(context, reporter)
    config, run_dir, main, recipe = context.config, context.run_dir, position.rank == 0, recipe_of(context.config)
    text, record = dump(config), dict[str, Any]()
    on_rank_0(lambda: record.update(_checked_record(context, reporter)), "run record")
    checks = ExitStack()
    agree(lambda: checks.enter_context(run_dir.checking(text)) if main else None)
    with checks:
        with trace_region("data preparation"):
            data = load_data(context, position, reporter, stop)
        if data.train.global_batch_size != config.train.global_batch_size:
            config = with_batch_size(config, data.train.global_batch_size)
            context = replace(context, config=config)
            if main:
                record["settings"]["train.global_batch_size"] = data.train.global_batch_size
        check_schedule(config, data.steps)
        check_best(config, has_validation=data.valid is not None)
        with trace_region("loading the model"):
            model = build_rank_model(config, context.plan, context.platform, position, context.precision)
        for message in model.messages:
            reporter.log(message)
        stepper = build_stepper(context, model, position, data.steps)
        if recipe.has_reference(config):
            parts = {"train": data.train, "valid": data.valid, "test": data.test}
            fresh = context.resume is None
            compute_reference(stepper, parts, run_dir.reference, position, fresh=fresh, stop=stop, log=reporter.log)
        grace = _grace_period(context, stepper, reporter, stop)
        rollouts = None
        if isinstance(data.train, PromptBatches):
            rollouts = build_rollouts(context, model, data.train, data.steps, stepper, grace, reporter)
        progress = resume(context, stepper, data, copies)
        if rollouts is not None and context.resume is not None:
            rollouts.load(context.resume)
        copies.loaded()
        check_profiled_steps(config, data.steps)
        record |= {"data": data.fingerprint} if main else {}
        agree(lambda: _begin(context, record, copies) if main else None)
    saves = _saves(context, progress, reporter, main=main)
    explainer = StepExplainer(stepper, None if rollouts else data.train.store, reporter, config.logging.spike_factor)
    skipped_steps = SkippedSteps(stepper, reporter)
    return Trainer(
        context=context,
        recipe=recipe,
        position=position,
        data=data,
        model=model,
        stepper=stepper,
        reporter=reporter,
        start=progress.step,
        record=record,
        saves=saves,
        copies=copies,
        exports=Exports(context, position, model, data.train, reporter, grace),
        grace=grace,
        early_stopping=EarlyStopping(progress.best, config.train.early_stopping, reporter),
        explainer=explainer,
        skipped_steps=skipped_steps,
        watchers=(
            _profile(context, position, model, stepper, reporter),
            _rank_reports(context, position, stepper, reporter),
            explainer,
            skipped_steps,
            MemoryWarnings(context.platform, reporter),
        ),
        rollouts=rollouts,
    )


def _begin(context: RunContext, record: dict[str, Any], copies: RunCopies) -> None:
    environment = run_environment(context)
    if (store := context.run_dir.store) is not None:
        store.claim(context.run_dir.root)
    context.run_dir.begin(dump(context.config), record, fresh=context.resume is None, environment=environment)
    copies.begin(context)


def _checked_record(context: RunContext, reporter: Reporter) -> dict[str, Any]:
    """The run record, and the checks before anything is tokenized that one rank does for all."""
    record, messages = checked_record(context)
    if context.resume is None:  # else the data is tokenized already
        check_first_records(context.config, context.tokenizer)
    for message in messages:
        reporter.log(message)
    return record


def load_data(context: RunContext, position: Position, reporter: Reporter, stop: StopFlag) -> RunData:
    """Tokenize what is not tokenized yet, and make the batches of this rank; a collective."""
    config, vocab_size = context.config, context.plan.architecture.vocab_size
    if config.data.mock:
        reporter.log(f"data: random tokens, {config.data.seq_length} per sample")
        return run_data(context, Corpus.mock(config, vocab_size), position, reporter.log)
    corpus = load_corpus(
        data_settings(config),
        find_data_sources(config),
        context.run_dir.data,
        context.tokenizer,
        vocab_size=vocab_size,
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
    end = answer_end(plan.source.config, context.tokenizer) if plan.architecture.head.score_head else None
    shared = shares_prefixes(config, plan, device_type)
    make = partial(
        corpus.batches, position=position, dp=dp, eod=eod, device_type=device_type, share_prefixes=shared, end=end
    )
    train, valid, test = make(config)
    size = default_batch_size(config, train.sequences_per_epoch, dp)
    if size != config.train.global_batch_size:
        report(
            f"train.global_batch_size={size} instead of the default {config.train.global_batch_size}, since the data "
            f"has only {train.sequences_per_epoch:,} sequences; give the setting to choose another size"
        )
        config = with_batch_size(config, size)
        train, valid, test = make(config)
    if not config.data.mock and (valid or test):
        report(split_note(config, corpus))
    if config.parallel.pp > 1 and device_type == "cuda" and not pads_to_one_length(config, device_type):
        why = "data.packing=false" if not config.data.packing else "moe.capacity_factor is set"
        report(f"pipeline: stages exchange the length of each micro batch, because {why}")
    steps = total_steps(config, train.sequences_per_epoch, size)
    if corpus.mixture:
        epochs = ", ".join(f"{name} {epochs:.2f}" for name, epochs in train.epochs(steps).items())
        report(f"epochs of each set in {counted(steps, 'step')}: {epochs}")
    for note in data_notes(config, plan.architecture, train, steps):
        report(f"note: {note}")
    return RunData(train, valid, test, steps, corpus.fingerprint(config) + train.order_version)


def build_stepper(context: RunContext, model: RankModel, position: Position, steps: int) -> Stepper:
    """Optimizer, learning rates, objective and teacher of a run of ``steps`` steps."""
    config, plan = context.config, context.plan
    optimizer = build_optimizer(model.stages, config.optim, config.train, family=plan.family)
    schedule = build_schedule(optimizer, config.optim, steps)
    with trace_region("loading the teacher"):
        teacher = build_teacher(config, plan, context.platform, position, context.precision)
    return Stepper(model.stages, optimizer, schedule, recipe_of(config).objective(config), teacher)


def resume(context: RunContext, stepper: Stepper, data: RunData, copies: RunCopies) -> Progress:
    """Load the checkpoint to resume from, if any; returns its progress, or step 0."""
    if context.resume is None:
        return Progress(step=0, data=data.fingerprint)
    with trace_region("loading the checkpoint"):
        progress = save_load.load(context.resume, stepper, context.plan.parallel, copies.fetch)
    now = data.fingerprint
    if now.removesuffix(data.train.order_version) == progress.data:  # of a version that had all orders in memory
        data.train.use_order_of(progress.data)
        now = progress.data
    check_fingerprint(progress.data, now, context.resume)
    if progress.step > data.steps:
        raise UsageError(
            f"{context.resume} is at step {progress.step}, beyond this run's {data.steps} steps. Raise train.steps."
        )
    return progress


def _saves(context: RunContext, progress: Progress, reporter: Reporter, *, main: bool) -> Saves:
    settings, folder, store = context.config.checkpoint, context.run_dir.checkpoints, context.run_dir.store
    saves = Saves(
        folder,
        context.plan.parallel,
        asynchronous=settings.asynchronous,
        saved=reporter.saved,
        log=reporter.log,
        store=store,
    )
    continues = context.resume is not None and context.run_dir.is_own(context.resume)
    saves.last_step = progress.step if continues else None
    if main and continues and settings.resume == "auto":  # a kill may have prevented it
        best = progress.best.step if settings.keep_best else None
        if store is None:
            remove_old(folder, progress.step, settings.keep, best)
        else:
            store.remove_old(progress.step, settings.keep, best)
    return saves


def _grace_period(context: RunContext, stepper: Stepper, reporter: Reporter, stop: StopFlag) -> GracePeriod:
    config = context.config
    has_stages = context.plan.parallel.pp > 1
    if has_stages and config.optim.optimizer == "adamw_8bit":
        reporter.log(
            "optim.optimizer=adamw_8bit with parallel.pp: after a stop request the run saves when its step has ended, "
            f"also if that takes longer than checkpoint.grace_s={config.checkpoint.grace_s:g}"
        )
    return GracePeriod(stop, config.checkpoint.grace_s, stepper.device, has_stages)


def _profile(
    context: RunContext, position: Position, model: RankModel, stepper: Stepper, reporter: Reporter
) -> StepProfile:
    return StepProfile(
        steps=context.config.train.profiled_steps,
        folder=context.run_dir.root / "profile",
        rank=position.rank,
        weights={name: tuple(tensor.shape) for name, tensor in live_tensors(model.stages).items()},
        memory_stats=lambda: memory_stats(model.stages, stepper.optimizer),
        device=stepper.device,
        peak_gib=context.platform.memory_gib,
        log=reporter.log,
    )


def _rank_reports(context: RunContext, position: Position, stepper: Stepper, reporter: Reporter) -> RankReports:
    settings = context.config.logging
    return RankReports(
        settings=settings,
        rank=position.rank,
        hosts=gather_objects(socket.gethostname()),
        stages=context.plan.parallel.pp,
        device=stepper.device,
        sensors=context.platform.sensors() if settings.ranks_every else None,
        reporter=reporter,
    )
