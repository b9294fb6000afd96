"""From a config to a trained model in Hugging Face format: what pretraining and fine-tuning share."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from isthmus.config.load import dump
from isthmus.config.schema import RunConfig
from isthmus.data.prepare import PrepareReport
from isthmus.data.store import SampleStore
from isthmus.engine.groups import agree, close_groups, world_from_environment
from isthmus.errors import UsageError
from isthmus.hf.tokenizer import Tokenizer, load_tokenizer
from isthmus.platforms.detect import detect
from isthmus.platforms.environment import apply_env
from isthmus.recipes.corpus import check_files, check_fingerprint, load_corpus
from isthmus.recipes.folder import RunFolder
from isthmus.recipes.session import blueprint, open_session, use_threads
from isthmus.train.loop import Device, Loop, Plan
from isthmus.train.metrics import Reporter
from isthmus.train.stop import StopFlag

PrepareFor = Callable[[RunConfig, Tokenizer, list[Path]], tuple[SampleStore, PrepareReport]]


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished run leaves, for people and for ``--json``."""

    out: str
    model: str
    """The exported Hugging Face folder."""
    steps: int
    loss: float | None
    """Of the last step; None when there was none to do."""
    valid_loss_before: float | None
    valid_loss: float | None
    tokens_per_s: float | None

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


def run(config: RunConfig, prepare: PrepareFor) -> RunResult:
    """Train as ``config`` says and export; every rank calls it.

    Raises:
        IsthmusError: with the exit code that belongs to what went wrong; a run that was asked to stop raises
            ``Preempted`` after saving.
    """
    rank, world_size, _ = world_from_environment()
    stop = StopFlag()
    stop.install()
    try:
        folder = RunFolder(Path(config.out))
        resume = folder.checkpoint_to_resume(config.checkpoint.resume)
        plans = blueprint(config)
        check_files(config)
        tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
        platform = detect(config.platform)
        said = [f"platform {platform.name}: {platform.reason}", f"layout: {plans.sizes}"]
        said += [f"{name}={value}: {why}" for name, (value, why) in apply_env(platform).items()]
        precision, why = platform.default_precision()
        if config.train.precision is not None:
            precision, why = config.train.precision, "train.precision"
            supported, reason = platform.supports(precision)
            if not supported:
                raise UsageError(
                    f"train.precision={precision} cannot be used here: {reason}. Leave it out or use fp32."
                )
        said.append(f"precision {precision}: {why}")
        said += filter(None, [use_threads(platform, config.train.threads)])
        session = open_session(config, plans, platform, precision)
        reporter = Reporter(
            folder.root, is_main=rank == 0, tensorboard=config.logging.tensorboard, every=config.logging.every
        )
        with reporter:
            for line in said:
                reporter.say(line)
            return _train(config, session, tokenizer, folder, resume, prepare, reporter, stop, world_size, precision)
    finally:
        stop.uninstall()
        close_groups()


def _train(
    config: RunConfig,
    session: Any,
    tokenizer: Tokenizer,
    folder: RunFolder,
    resume: Path | None,
    prepare: PrepareFor,
    reporter: Reporter,
    stop: StopFlag,
    world_size: int,
    precision: str,
) -> RunResult:
    from isthmus.engine import checkpoint
    from isthmus.engine.optimizer import OptimizerSettings, build_optimizer, build_schedule
    from isthmus.engine.step import Stepper

    plans, platform, main = session.blueprint, session.platform, session.position.rank == 0
    text = dump(config)
    checks = ExitStack()
    agree(lambda: checks.enter_context(folder.checking(text)) if main else None)
    with checks:
        corpus = load_corpus(
            config,
            folder.data,
            tokenizer,
            partial(prepare, config, tokenizer),
            vocab_size=plans.architecture.vocab_size,
            resume=resume,
            say=reporter.say,
        )
        batches, held_out = corpus.batches(config, session.position, plans.sizes.dp)
        steps = config.train.steps or math.ceil((config.train.epochs or 1) * batches.steps_per_epoch)
        settings = OptimizerSettings(total_steps=steps, **config.optim.model_dump())
        optimizer = build_optimizer(session.model, settings)
        stepper = Stepper(session.model, optimizer, build_schedule(optimizer, settings))
        fingerprint = corpus.fingerprint(config)
        start = 0
        if resume is not None:
            progress = checkpoint.load(resume, stepper, plans.sizes)
            check_fingerprint(progress.data, fingerprint, resume)
            start = progress.step
            reporter.say(f"resumed from {resume} at step {start}")
        if start > steps:
            raise UsageError(f"{resume} is at step {start}, beyond this run's {steps} steps. Raise train.steps.")
        agree(lambda: folder.begin(text, fresh=resume is None) if main else None)
    reporter.begin(total_steps=steps, start=start)

    def save(step: int) -> None:
        progress = checkpoint.Progress(step=step, data=fingerprint)
        path = checkpoint.save(folder.checkpoints, stepper, progress, plans.sizes, keep=config.checkpoint.keep)
        reporter.say(f"saved {path}")

    dtype = {"source": None, "float32": torch.float32, "bfloat16": torch.bfloat16}[config.model.export_dtype]

    def export(step: int | None) -> None:
        destination = folder.export(step)
        session.export(destination, tokenizer, dtype=dtype, replace=True)
        reporter.say(f"exported {destination}")

    loop = Loop(
        stepper,
        batches,
        held_out,
        architecture=plans.architecture,
        position=session.position,
        device=Device(
            world_size=world_size, peak_tflops=platform.peak_tflops(precision), memory_gib=platform.memory_gib
        ),
        reporter=reporter,
        save=save,
        export=export,
    )
    before = loop.evaluate(start) if start < steps else None
    outcome = loop.run(
        Plan(
            start=start,
            steps=steps,
            eval_every=config.train.eval_every,
            save_every=config.checkpoint.every,
            export_every=config.checkpoint.hf_every,
        ),
        stop,
    )
    if config.checkpoint.save_final and start < steps:
        save(steps)
    export(None)
    return RunResult(
        out=str(folder.root),
        model=str(folder.export()),
        steps=steps,
        loss=outcome.last_loss,
        valid_loss_before=before,
        valid_loss=outcome.valid_loss,
        tokens_per_s=outcome.tokens_per_s,
    )
