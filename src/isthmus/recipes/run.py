"""From a config to a trained model in Hugging Face format: what pretraining and fine-tuning share."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isthmus.config.load import dump
from isthmus.config.schema import RunConfig
from isthmus.data.batching.pair_batches import PairBatches
from isthmus.data.store.sample_store import SampleStore
from isthmus.data.tokenize.tokenize_files import TokenizeStats
from isthmus.engine.parallel.process_groups import Position, agree, close_groups, join_ranks, open_groups
from isthmus.errors import UsageError
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.launch.heartbeat import Pulse
from isthmus.launch.rank_env import ranks_here, speaks_last
from isthmus.platforms.base import Platform
from isthmus.platforms.detect import detect
from isthmus.platforms.environment import apply_env
from isthmus.platforms.known_variables import words_about
from isthmus.recipes.data.corpus import check_files, check_fingerprint, load_corpus
from isthmus.recipes.dpo_reference import check_preference, find_reference, objective_of
from isthmus.recipes.run_dir import RunFolder
from isthmus.recipes.setup.layout_checks import check_offload
from isthmus.recipes.setup.memory_estimate import check_footprint
from isthmus.recipes.setup.run_tokenizer import run_tokenizer
from isthmus.recipes.setup.session import (
    Blueprint,
    Session,
    blueprint,
    build_session,
    check_precision,
    check_schedule,
    check_training,
    run_shape,
    use_threads,
)
from isthmus.train.loop import Device, Loop
from isthmus.train.metrics import Reporter
from isthmus.train.step_profile import StepProfile
from isthmus.train.stop import StopFlag

PrepareFor = Callable[[RunConfig, Tokenizer, list[Path]], tuple[SampleStore, TokenizeStats]]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run leaves, for people and for ``--json``."""

    out: str
    model: str | None
    """The exported Hugging Face folder; None without checkpoint.export_final."""
    steps: int
    loss: float | None
    """Of the last step; None when there was none to do."""
    valid_loss_before: float | None
    valid_loss: float | None
    test_loss: float | None
    tokens_per_s: float | None

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Ground:
    """What a run stands on, known before its ranks meet; most mistakes show here, in every rank alike."""

    config: RunConfig
    folder: RunFolder
    resume: Path | None
    """The checkpoint to go on from."""
    plans: Blueprint
    tokenizer: Tokenizer
    platform: Platform
    precision: str
    said: tuple[str, ...]
    """What was decided, and why, for the user."""


def run(recipe: str, config: RunConfig, prepare: PrepareFor) -> RunResult:
    """Train as ``config`` says and export; every rank calls it.

    Args:
        recipe: the one that ``prepare`` belongs to; a config of another is refused.
        config: of the run.
        prepare: records to samples.

    Raises:
        IsthmusError: with the exit code that belongs to what went wrong; a run that was asked to stop raises
            ``Preempted`` after saving.
    """
    if config.recipe != recipe:
        raise UsageError(
            f"isthmus.{recipe} was given a config of recipe={config.recipe}. Call isthmus.{config.recipe}, or load a "
            f"config for {recipe}."
        )
    with StopFlag() as stop:
        try:
            ground = survey(config)
            limits = config.parallel
            met = join_ranks(ground.platform, join_timeout_s=limits.join_timeout_s, timeout_s=limits.timeout_s)
            with Pulse(limits.timeout_s) as pulse:
                try:
                    return _run_joined(ground, met, prepare, stop)
                except RuntimeError as error:
                    end = pulse.explain(error)
                    if end is None:
                        raise
                    raise end from error
        finally:
            close_groups()


def _run_joined(ground: Ground, met: str, prepare: PrepareFor, stop: StopFlag) -> RunResult:
    """The run, of ranks that have met."""
    config, logging = ground.config, ground.config.logging
    timeout_s = config.parallel.timeout_s
    position = open_groups(config.parallel, ground.platform, seed=config.train.seed, timeout_s=timeout_s)
    with Reporter(
        ground.folder.root,
        is_main=position.rank == 0,
        tensorboard=logging.tensorboard,
        every=logging.every,
        device="rank" if ground.platform.device_type == "cpu" else "GPU",
        style=logging.style,
        # Megatron-LM prints on the last rank, and who reads its logs looks for them on the last machine.
        echoes=logging.style == "megatron" and speaks_last(),
    ) as reporter:
        for line in (*ground.said, *([met] if met else [])):
            reporter.say(line)
        return _train(ground, position, prepare, reporter, stop)


def survey(config: RunConfig) -> Ground:
    """Look at everything that can be looked at without the other ranks.

    Raises:
        IsthmusError: an input is absent or damaged, or the config asks for what cannot be.
    """
    folder = RunFolder(Path(config.out))
    resume = folder.checkpoint_to_resume(config.checkpoint.resume)
    plans = blueprint(config)
    check_training(config, plans)
    check_preference(config, plans.architecture)
    check_files(config)
    tokenizer = run_tokenizer(config, plans.source, plans.architecture.vocab_size)
    platform = detect(config.platform)
    chosen = config.train.precision
    precision, why = (chosen, "train.precision") if chosen is not None else platform.default_precision()
    check_precision(platform, precision)
    check_offload(config.optim, config.parallel, platform.device_type)
    memory = check_footprint(plans, config, platform, precision, ranks_here=ranks_here())
    shape = run_shape(plans, ranks_here())
    environment = [f"{name}={value}: {reason}" for name, (value, reason) in apply_env(platform, shape).items()]
    environment += words_about(os.environ, shape, on_gpu=platform.device_type == "cuda")
    threads = use_threads(platform, config.train.threads)
    said = [
        f"platform {platform.name}: {platform.reason}",
        f"layout: {config.parallel.describe(plans.world_size)}",
        *plans.weights.notes,
        memory,
        *environment,
    ]
    said += [f"precision {precision}: {why}", *([threads] if threads else []), *platform.prepare_process()]
    return Ground(config, folder, resume, plans, tokenizer, platform, precision, tuple(said))


def _train(ground: Ground, position: Position, prepare: PrepareFor, reporter: Reporter, stop: StopFlag) -> RunResult:
    from isthmus.engine.checkpoint import save_load
    from isthmus.engine.megatron_model import live_tensors
    from isthmus.engine.memory_stats import held_bytes
    from isthmus.engine.optim.optimizer import build_optimizer, build_schedule
    from isthmus.engine.step import Stepper

    config, folder, plans, main = ground.config, ground.folder, ground.plans, position.rank == 0
    text = dump(config)
    checks = ExitStack()
    agree(lambda: checks.enter_context(folder.checking(text)) if main else None)
    with checks:
        corpus = load_corpus(
            config,
            folder.data,
            ground.tokenizer,
            partial(prepare, config, ground.tokenizer),
            vocab_size=plans.architecture.vocab_size,
            resume=ground.resume,
            say=reporter.say,
        )
        batches, held_out, test = corpus.batches(config, position, config.parallel.dp(plans.world_size))
        steps = config.train.steps or math.ceil((config.train.epochs or 1) * batches.steps_per_epoch)
        check_schedule(config, steps)
        if corpus.shares:
            mix = ", ".join(f"{name} {epochs:.2f}" for name, epochs in batches.epochs(steps).items())
            reporter.say(f"epochs of each set in {steps} steps: {mix}")
        session = build_session(config, plans, ground.platform, position, ground.precision)
        for line in session.said:
            reporter.say(line)
        optimizer = build_optimizer(session.model, config.optim, config.train)
        schedule = build_schedule(optimizer, config.optim, steps)
        stepper = Stepper(session.model, optimizer, schedule, objective_of(config))
        fingerprint = corpus.fingerprint(config)
        start = 0
        pairs = {"train": batches, "valid": held_out, "test": test}
        find_reference(
            stepper,
            {name: part for name, part in pairs.items() if isinstance(part, PairBatches)},
            folder.reference,
            position,
            fresh=ground.resume is None,
            stop=stop,
            say=reporter.say,
        )
        if ground.resume is not None:
            progress = save_load.load(ground.resume, stepper, config.parallel)
            check_fingerprint(progress.data, fingerprint, ground.resume)
            start = progress.step
            reporter.say(f"resumed from {ground.resume} at step {start}")
        if start > steps:
            raise UsageError(f"{ground.resume} is at step {start}, beyond this run's {steps} steps. Raise train.steps.")
        profiled = config.train.profiled_steps
        if profiled and profiled[-1] > steps:
            raise UsageError(
                f"train.profile={config.train.profile} goes beyond the {steps} steps of this run. Name steps from 1 to "
                f"{steps}."
            )
        agree(lambda: folder.begin(text, fresh=ground.resume is None) if main else None)
    reporter.begin(total_steps=steps, start=start)
    if profiled and profiled[-1] <= start < steps:
        reporter.say(f"train.profile={config.train.profile}: those steps are done already; none is profiled")

    def save(step: int) -> None:
        progress = save_load.Progress(step=step, data=fingerprint)
        path = save_load.save(
            folder.checkpoints,
            stepper,
            progress,
            config.parallel,
            keep=config.checkpoint.keep,
            args=session.megatron_args(step),
            write_beside=lambda stage: session.write_config(stage, ground.tokenizer),
        )
        reporter.say(f"saved {path}")

    def export(step: int | None) -> None:
        _export(ground, session, step)
        reporter.say(f"exported {folder.export(step)}")

    loop = Loop(
        stepper,
        batches,
        held_out,
        test,
        architecture=plans.architecture,
        position=position,
        device=Device(
            world_size=plans.world_size,
            peak_tflops=ground.platform.peak_tflops(ground.precision),
            memory_gib=ground.platform.memory_gib,
            memory_used=ground.platform.memory_used if config.logging.style == "megatron" else lambda: None,
        ),
        reporter=reporter,
        profile=StepProfile(
            profiled,
            folder.root,
            rank=position.rank,
            weights={name: tuple(tensor.shape) for name, tensor in live_tensors(session.model).items()},
            held=lambda: held_bytes(session.model, optimizer),
            memory_gib=ground.platform.memory_gib,
            say=reporter.say,
        ),
        save=save,
        export=export,
    )
    before = loop.evaluate(start) if start < steps else None
    outcome = loop.run(config.train, config.checkpoint, start=start, steps=steps, stop=stop)
    if config.checkpoint.save_final and start < steps:
        save(steps)
    if config.checkpoint.export_final:
        export(None)
    return RunResult(
        out=str(folder.root),
        model=str(folder.export()) if config.checkpoint.export_final else None,
        steps=steps,
        loss=outcome.last_loss,
        valid_loss_before=before,
        valid_loss=outcome.valid_loss,
        test_loss=outcome.test_loss,
        tokens_per_s=outcome.tokens_per_s,
    )


def _export(ground: Ground, session: Session, step: int | None) -> None:
    dtype = {"source": None, "float32": torch.float32, "bfloat16": torch.bfloat16}[ground.config.model.export_dtype]
    session.export(ground.folder.export(step), ground.tokenizer, dtype=dtype, replace=True)
