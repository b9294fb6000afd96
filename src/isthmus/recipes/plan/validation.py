"""All checks of a run that need no other rank, also used by the dry run."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from isthmus.config.schema import RunConfig
from isthmus.convert.coverage import check_coverage
from isthmus.errors import UsageError
from isthmus.hf.hub import check_name
from isthmus.hf.tokenizer.tokenizer import Tokenizer
from isthmus.platforms import rank_env
from isthmus.platforms.base import Platform, RunShape
from isthmus.platforms.cpu import CpuPlatform
from isthmus.platforms.detect import detect
from isthmus.recipes.data.corpus import check_files
from isthmus.recipes.data.default_batch import with_batch_size
from isthmus.recipes.data.eval_prompts import EvalPrompt, check_end_tokens, eval_prompts
from isthmus.recipes.model.model_source import run_tokenizer
from isthmus.recipes.model.teacher_model import check_teacher, teacher_messages
from isthmus.recipes.plan.copies_check import check_copies
from isthmus.recipes.plan.layout_checks import check_async_layout, check_batch_invariant, check_offload
from isthmus.recipes.plan.memory_estimate import check_memory
from isthmus.recipes.plan.model_plan import (
    ModelPlan,
    check_precision,
    check_training,
    dropout_messages,
    open_run_model,
    plan_model,
)
from isthmus.recipes.plan.prefix_sharing import shares_prefixes
from isthmus.recipes.plan.step_matmuls import tuning_messages
from isthmus.recipes.registry import recipe_of
from isthmus.recipes.rollout.rewards import check_rewards
from isthmus.recipes.rollout.routed_experts import replay_shapes
from isthmus.recipes.rollout.vllm_server import check_engine
from isthmus.recipes.run_dir import RunDir, read_record
from isthmus.train.callbacks import callback_class
from isthmus.train.trackers import check_trackers


@dataclass(frozen=True, slots=True)
class RunContext:
    """A validated run, the same on every rank."""

    config: RunConfig
    run_dir: RunDir
    resume: Path | None
    plan: ModelPlan
    tokenizer: Tokenizer
    prompts: tuple[EvalPrompt, ...]
    """Prompts of ``eval.generate``."""
    platform: Platform
    shape: RunShape
    precision: str
    messages: tuple[str, ...]
    """Platform, layout, memory estimate and precision with their reasons, for the log."""


def validate(
    config: RunConfig,
    *,
    world_size: int | None = None,
    ranks_here: int,
    machine: Platform | None = None,
    unmet: list[str] | None = None,
) -> RunContext:
    """Check a run before its ranks join. Errors are reported in this order:

    1. run folder and checkpoint to resume from,
    2. model folder, family, layout and experts (:func:`plan_model`),
    3. training settings (:func:`check_training`),
    4. data files, names and shapes of the weights, rewards,
    5. tokenizer, end tokens, prompts of evaluations,
    6. platform, precision, teacher, optimizer offload, attention backend,
    7. memory.

    Rank 0 then compares the run with its checkpoint (:mod:`isthmus.recipes.plan.resume_check`) and renders the first
    records (:mod:`isthmus.recipes.data.first_records`), before anything is written. Checks that need all samples are in
    :mod:`isthmus.recipes.build`.

    Args:
        machine: to check 6. and 7. against; None: this one.
        unmet: gets the errors of 6. and 7. if this machine has no GPU, in place of raising them.
    """
    run_dir = RunDir(Path(config.out), config.checkpoint.store)
    resume = run_dir.checkpoint_to_resume(config.checkpoint.resume)
    config = with_recorded_batch_size(config, resume)
    plan = plan_model(open_run_model(config), config, world_size=world_size)
    check_training(config, plan)
    check_files(config)
    _check_weights(config, plan)
    if recipe_of(config).generates_answers:
        check_rewards(config)
        if config.rollout.engine == "vllm":
            check_engine(config)
            replay_shapes(config, plan.architecture)
    if config.checkpoint.push is not None:
        check_name(config.checkpoint.push)
    for name in config.callbacks:
        callback_class(name)
    tokenizer = run_tokenizer(config, plan.source, plan.architecture.vocab_size)
    if recipe_of(config).generates_answers:
        check_end_tokens(plan.source, tokenizer)
    prompts = eval_prompts(config, tokenizer, plan.architecture)
    shape = RunShape(
        nodes=math.ceil(plan.world_size / ranks_here),
        fsdp=bool(config.parallel.fsdp),
        tp_or_cp=config.parallel.tp > 1 or config.parallel.cp > 1,
        async_tp=config.parallel.async_tp,
        gemm_tuning_file=str(run_dir.gemm_tuning(rank_env.rank())) if config.train.gemm_tuning else None,
        deterministic=config.train.deterministic,
    )
    here = partial(_errors_of_this_machine, unmet)
    platform: Platform = machine or CpuPlatform(reason=f"platform={config.platform} is not on this machine")
    with here():
        platform = machine or detect(config.platform, shape)
    chosen = config.train.precision
    reason = "train.precision, emulated (train.emulate_fp8)" if config.train.emulate_fp8 else "train.precision"
    precision, reason = (chosen, reason) if chosen is not None else platform.default_precision()
    with here():
        train = config.train
        check_precision(platform, precision, emulate_fp8=train.emulate_fp8, fp8_scaling=train.fp8_scaling)
    check_teacher(config, plan, tokenizer, platform)
    with here():
        check_offload(config.optim, config.rollout, config.parallel, platform.device_type)
    with here():
        check_async_layout(config.parallel, platform.device_type, precision, ranks_here=ranks_here)
    with here():
        check_batch_invariant(config, platform.device_type, precision)
    with here():
        shares = shares_prefixes(config, plan, platform.device_type)
    tuned: tuple[str, ...] = ()
    if machine is None:  # else the GPU is not here
        with here():
            _check_attention(config, plan, platform, precision)
        with here():
            tuned = tuning_messages(config, plan, platform, precision)
    memory: list[str] = []
    with here():
        memory.append(check_memory(plan, config, platform, precision, ranks_here=ranks_here))
    if machine is None:
        with here():
            memory += check_copies(plan, config, platform, precision, ranks_here=ranks_here)
    messages = (
        *tuned,
        *check_trackers(config.logging),
        f"platform {platform.name}: {platform.reason}",
        f"layout: {config.parallel.describe(plan.world_size)}",
        *plan.weights.notes,
        *dropout_messages(plan),
        *(() if plan.adapters is None else [f"adapters: {plan.adapters.summary()}"]),
        *teacher_messages(config, plan, precision),
        *memory,
        *(("answers to one prompt share its computation (train.share_prefixes)",) if shares else ()),
        f"precision {precision}: {reason}",
        learning_rate_message(config),
    )
    return RunContext(config, run_dir, resume, plan, tokenizer, prompts, platform, shape, precision, messages)


def learning_rate_message(config: RunConfig) -> str:
    """Learning rate and warm-up of the run, and where they come from."""
    optim, default = config.optim, config.default_learning_rate
    warmup = f"{optim.warmup_steps} steps of" if optim.warmup_steps else f"{100 * optim.warmup_fraction:.3g}%"
    text = f"learning rate {optim.lr:g}, {warmup} warm-up"
    weights = "from random weights" if config.model.init == "random" else "of all weights"
    kind = f"{config.recipe} {'with adapters' if config.lora.enabled else weights}"
    if (optim.lr, optim.warmup_steps, optim.warmup_fraction) == (default.lr, 0, default.warmup_fraction):
        return f"{text}: the default of {kind}, {default.source}; optim.lr changes it"
    return f"{text} (default of {kind}: {default.lr:g}, {100 * default.warmup_fraction:.3g}%)"


def with_recorded_batch_size(config: RunConfig, resume: Path | None) -> RunConfig:
    """A default batch size may depend on the data, and that of a resumed run is in its checkpoint."""
    if resume is None or "global_batch_size" in config.train.model_fields_set:
        return config
    settings = (read_record(resume) or {}).get("settings")
    size = settings.get("train.global_batch_size") if isinstance(settings, dict) else None
    return with_batch_size(config, size) if isinstance(size, int) else config


@contextmanager
def _errors_of_this_machine(unmet: list[str] | None) -> Iterator[None]:
    """Add an error of the block to ``unmet``, if this machine has no GPU."""
    try:
        yield
    except UsageError as error:
        if unmet is None or torch.cuda.is_available():
            raise
        unmet.append(str(error))


def _check_attention(config: RunConfig, plan: ModelPlan, platform: Platform, precision: str) -> None:
    if config.train.attention != "auto":
        from isthmus.recipes.model.rank_model import select_attention  # imports the engine

        select_attention(config, plan, torch.device(platform.device_type), precision, verified=False)


def _check_weights(config: RunConfig, plan: ModelPlan) -> None:
    """Check names and shapes of the tensors that the run reads."""
    if config.model.init == "hf":
        check_coverage(plan.weights.source, plan.family, plan.architecture)
    if plan.teacher is not None and config.distill.teacher_init == "hf":
        check_coverage(plan.teacher.weights.source, plan.teacher.family, plan.teacher.architecture)
