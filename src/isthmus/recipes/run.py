"""A training run, shared by all recipes: validate, join the ranks, and hand over to the trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from isthmus.config.recipes import RecipeName
from isthmus.config.schema import RunConfig
from isthmus.engine.parallel.process_groups import agree, close_groups, on_rank_0, open_groups
from isthmus.errors import OutputInUse, Preempted, UsageError
from isthmus.files.checked_files import trusting
from isthmus.hf.hub import check_access
from isthmus.launch.rendezvous import join_ranks
from isthmus.platforms import rank_env
from isthmus.platforms.deterministic import restored_algorithms
from isthmus.recipes.build import build_trainer
from isthmus.recipes.elastic import with_fitting_ranks
from isthmus.recipes.plan.validation import RunContext, validate
from isthmus.recipes.process_setup import leave_busy_cores, prepare_process
from isthmus.recipes.run_dir import RunDir
from isthmus.recipes.run_result import RunResult as RunResult
from isthmus.train.reporter import Reporter
from isthmus.train.stop import StopFlag


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


def grpo(config: RunConfig) -> RunResult:
    """Train on rewards of the model's own answers and export it, as :func:`sft` does."""
    return _run_as("grpo", config)


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
    with trusting(config.checkpoint.skip_checksums), restored_algorithms(), StopFlag() as stop:
        try:
            config, fitting = with_fitting_ranks(config)
            context = leave_busy_cores(validate(config, ranks_here=rank_env.local_world_size()))
            messages = [*context.messages, *fitting, *prepare_process(context)]
            limits = config.parallel
            with join_ranks(
                context.platform,
                join_timeout_s=limits.join_timeout_s,
                timeout_s=limits.timeout_s,
                stopped=lambda: stop.requested,
            ) as machines:
                result = _run_rank(context, [*messages, *([machines] if machines else [])], stop)
        except BaseException as error:
            # NCCL may wait for the other ranks when it closes the groups, before this rank prints its error.
            if rank_env.world_size() == 1 or isinstance(error, Preempted):
                close_groups()
            if stop.interrupted:
                raise KeyboardInterrupt(RunDir(Path(config.out), config.checkpoint.store).interrupted()) from error
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
        return build_trainer(context, position, reporter, stop).run()


@contextmanager
def _locked(context: RunContext) -> Iterator[None]:
    """Lock the run folder for the block; raises OutputInUse if another run had it and changed it."""
    with context.run_dir.locked():
        if context.run_dir.checkpoint_to_resume(context.config.checkpoint.resume) != context.resume:
            raise OutputInUse(
                f"{context.run_dir.root} was written by another run, which has just ended. Start this command again to "
                "resume it, or choose another folder with --out."
            )
        yield
