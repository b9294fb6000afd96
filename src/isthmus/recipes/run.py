"""A training run, shared by all recipes: validate, join the ranks, load data, build, train, save, export."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from typing import Any

from isthmus.config.load import origins_of
from isthmus.config.recipes import RecipeName
from isthmus.config.schema import RunConfig
from isthmus.engine.decoder.live_parameters import live_tensors
from isthmus.engine.optim.optimizer import memory_stats
from isthmus.engine.parallel.process_groups import agree, close_groups, gather_objects, on_rank_0, open_groups
from isthmus.errors import NoSpace, Preempted, UsageError
from isthmus.files.checked_files import trusting
from isthmus.hf.hub import check_access
from isthmus.launch.rendezvous import join_ranks
from isthmus.platforms import rank_env
from isthmus.platforms.deterministic import own_algorithms
from isthmus.recipes.plan.validation import RunContext, validate
from isthmus.recipes.process_setup import leave_busy_cores, prepare_process
from isthmus.recipes.registry import recipe_of
from isthmus.recipes.training import Training, describe, exports_model
from isthmus.recipes.training_setup import set_up
from isthmus.train.loop import Loop, is_due
from isthmus.train.rank_reports import RankReports
from isthmus.train.reporter import Reporter
from isthmus.train.row_file import first_valid_loss
from isthmus.train.step_explainer import StepExplainer
from isthmus.train.step_profile import StepProfile
from isthmus.train.stop import StopFlag


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of a finished run."""

    out: str
    model: str | None
    """The exported Hugging Face folder; None without ``checkpoint.export_final``, or if only adapters are exported."""
    adapter: str | None
    """The exported adapter of PEFT; None without adapters or ``checkpoint.export_final``."""
    pushed: str | None
    """Address of the repository; None without ``checkpoint.push``, and on other ranks than the first."""
    steps: int
    loss: float | None
    """Of the last step; None if the run had no steps left."""
    valid_loss_before: float | None
    """Before the first step, also of a run that was resumed."""
    valid_loss: float | None
    test_loss: float | None
    tokens_per_s: float | None
    memory_gib: float
    """Peak of the rank with most."""

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


def sft(config: RunConfig) -> RunResult:
    """Fine-tune on chats and export the model; call it on every rank.

    Raises:
        Preempted: the run was stopped by a signal; its state is saved.
        IsthmusError: any other failure, with its exit code.
    """
    return _run_as("sft", config)


def dpo(config: RunConfig) -> RunResult:
    """Train on preference pairs with DPO and export the model, as :func:`sft` does."""
    return _run_as("dpo", config)


def kto(config: RunConfig) -> RunResult:
    """Train on answers with labels and export the model, as :func:`sft` does."""
    return _run_as("kto", config)


def reward(config: RunConfig) -> RunResult:
    """Train a reward model and export it, as :func:`sft` does."""
    return _run_as("reward", config)


def distill(config: RunConfig) -> RunResult:
    """Train a student on chats with a frozen teacher and export it, as :func:`sft` does."""
    return _run_as("distill", config)


def pretrain(config: RunConfig) -> RunResult:
    """Pretrain on text and export the model, as :func:`sft` does."""
    return _run_as("pretrain", config)


def _run_as(recipe: RecipeName, config: RunConfig) -> RunResult:
    if config.recipe != recipe:
        raise UsageError(
            f"isthmus.{recipe} was given a config of recipe={config.recipe}. Call isthmus.{config.recipe}, or load a "
            f"config for {recipe}."
        )
    return run_recipe(config)


def run_recipe(config: RunConfig) -> RunResult:
    """Train with the recipe of the config and export; a collective."""
    with trusting(config.checkpoint.skip_checksums), own_algorithms(), StopFlag() as stop:
        try:
            context = leave_busy_cores(validate(config, ranks_here=rank_env.local_world_size()))
            messages = [*context.messages, *prepare_process(context)]
            limits = config.parallel
            with join_ranks(
                context.platform, join_timeout_s=limits.join_timeout_s, timeout_s=limits.timeout_s,
                stopped=lambda: stop.requested,
            ) as machines:  # fmt: skip
                result = _run_rank(context, [*messages, *([machines] if machines else [])], stop)
        except BaseException as error:
            # NCCL may wait for the other ranks when it closes the groups, before this rank prints its error.
            if rank_env.world_size() == 1 or isinstance(error, Preempted):
                close_groups()
            raise
    close_groups()
    return result


def _run_rank(context: RunContext, messages: Sequence[str], stop: StopFlag) -> RunResult:
    config, platform = context.config, context.platform
    position = open_groups(config.parallel, platform, seed=config.train.seed, timeout_s=config.parallel.timeout_s)
    lock = ExitStack()
    agree(lambda: lock.enter_context(_locked(context)) if position.rank == 0 else None)
    with (
        lock,
        Reporter(
            context.run_dir.root,
            config.logging,
            is_main=position.rank == 0,
            callbacks=config.callbacks,
            device="rank" if platform.device_type == "cpu" else "GPU",
            # Megatron-LM prints on the last rank; its users look for the log on the last machine.
            prints_steps=config.logging.style == "megatron" and rank_env.is_last_of_several_machines(),
        ) as reporter,
    ):
        for message in messages:
            reporter.log(message)
        if (repo := config.checkpoint.push) is not None:
            on_rank_0(lambda: check_access(repo), "access to the Hub")
        return _train(set_up(context, position, reporter, stop))


@contextmanager
def _locked(context: RunContext) -> Iterator[None]:
    """Lock the run folder for the block; raises NoSpace if another run had it and changed it."""
    with context.run_dir.locked():
        if context.run_dir.checkpoint_to_resume(context.config.checkpoint.resume) != context.resume:
            raise NoSpace(
                f"{context.run_dir.root} was written by another run, which has just ended. Start this command again to "
                "resume it, or choose another folder with --out."
            )
        yield


def _train(training: Training) -> RunResult:
    context, start, steps = training.context, training.start, training.data.steps
    config, reporter = context.config, training.reporter
    reporter.log(describe(context, training.data))
    settings = {name: value for name, value, _ in origins_of(config.model_dump(mode="json"), {})}
    reporter.begin(total_steps=steps, start=start, settings=settings)
    if context.resume is not None:
        text = f"resumed from {context.resume} at step {start}"
        reporter.event(start, "resume", text, path=str(context.resume))
    profiled = config.train.profiled_steps
    if profiled and profiled[-1] <= start < steps:
        reporter.log(f"train.profile={config.train.profile}: these steps are done already; no step is profiled")
    continues = context.resume is not None and context.resume.parent.resolve() == context.run_dir.checkpoints.resolve()
    evaluates = start < steps and (not continues or is_due(config.train.eval_every, start))
    exports = continues and start < steps and training.lacks_export(start)
    try:
        before, outcome = _build_loop(training).run(start, evaluates_first=evaluates, exports_first=exports)
        if config.checkpoint.save_final and start < outcome.last_step:
            training.save(outcome.last_step)
        training.saves.finish()
    finally:
        training.saves.close(config.checkpoint.grace_s)
    best, exported_step = training.best, outcome.last_step
    if config.checkpoint.keep_best and best.step is not None and best.step != outcome.last_step:
        training.load_best()
        exported_step = best.step
    if config.checkpoint.export_final:
        try:
            training.export(exported_step, final=True)
        except Preempted:
            if exported_step == outcome.last_step:
                training.save(exported_step, wait=True)
            raise
    address = training.push()
    first = first_valid_loss(context.run_dir.root / "metrics.jsonl")  # None on a machine without the run folder
    return RunResult(
        out=str(context.run_dir.root),
        model=str(context.run_dir.export()) if config.checkpoint.export_final and exports_model(config) else None,
        adapter=str(context.run_dir.adapter()) if config.checkpoint.export_final and config.lora.enabled else None,
        pushed=address,
        steps=outcome.last_step,
        loss=outcome.last_loss,
        valid_loss_before=before if first is None else first,
        valid_loss=best.loss if config.checkpoint.keep_best and best.step is not None else outcome.valid_loss,
        test_loss=outcome.test_loss,
        tokens_per_s=outcome.tokens_per_s,
        memory_gib=max(gather_objects(context.platform.memory_gib())),
    )


def _build_loop(training: Training) -> Loop:
    context, stages = training.context, training.model.stages
    return Loop(
        stepper=training.stepper,
        data=training.data,
        config=context.config,
        architecture=context.plan.architecture,
        teacher=None if context.plan.teacher is None else context.plan.teacher.architecture,
        platform=context.platform,
        precision=context.precision,
        position=training.position,
        world_size=context.plan.world_size,
        reporter=training.reporter,
        profile=StepProfile(
            steps=context.config.train.profiled_steps,
            folder=context.run_dir.root / "profile",
            rank=training.position.rank,
            weights={name: tuple(tensor.shape) for name, tensor in live_tensors(stages).items()},
            memory_stats=lambda: memory_stats(stages, training.stepper.optimizer),
            device=training.stepper.device,
            peak_gib=context.platform.memory_gib,
            log=training.reporter.log,
        ),
        explainer=StepExplainer(
            training.stepper, training.data.train.store, training.reporter, context.config.logging.spike_factor
        ),
        ranks=RankReports(
            settings=context.config.logging,
            rank=training.position.rank,
            hosts=gather_objects(socket.gethostname()),
            stages=context.plan.parallel.pp,
            device=training.stepper.device,
            sensors=context.platform.sensors() if context.config.logging.ranks_every else None,
            reporter=training.reporter,
        ),
        best=training.best,
        eval_objective=eval_objective() if (eval_objective := recipe_of(context.config).eval_objective) else None,
        answer=training.answer,
        save=training.save,
        saves=training.saves,
        beside=training.beside,
        export=training.export,
        grace=training.grace,
    )
