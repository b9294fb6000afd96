"""A training run, shared by all recipes: validate, join the ranks, load data, build, train, save, export."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from isthmus.atomic_write import write_atomic
from isthmus.config.load import dump, load_config, origins_of
from isthmus.config.schema import RunConfig
from isthmus.engine.checkpoint import save_load
from isthmus.engine.inference import Decoding, Inference
from isthmus.engine.megatron_model import live_tensors
from isthmus.engine.optim.learning_rate import build_schedule
from isthmus.engine.optim.optimizer import build_optimizer, memory_stats
from isthmus.engine.parallel.process_groups import Position, agree, close_groups, on_rank_0, open_groups
from isthmus.engine.step import Stepper
from isthmus.engine.trace_region import trace_region
from isthmus.errors import DataError, Preempted, UsageError, disk_errors
from isthmus.hf.hub import check_access, push
from isthmus.launch.rendezvous import join_ranks
from isthmus.platforms import rank_env
from isthmus.platforms.cpu_threads import cores, cores_in_use
from isthmus.platforms.deterministic import own_algorithms, use_deterministic_algorithms
from isthmus.platforms.environment import apply_env, remarks_on
from isthmus.recipes.data.corpus import check_fingerprint, load_corpus, pads_to_one_length
from isthmus.recipes.data.eval_prompts import end_tokens
from isthmus.recipes.dpo_reference import (
    compute_reference,
    eval_objective_of,
    has_reference,
    objective_of,
    stepper_of,
)
from isthmus.recipes.model_card import model_card
from isthmus.recipes.setup.adapter_export import export_adapter
from isthmus.recipes.setup.hf_export import checkpoint_args, export_hf, write_checkpoint_config
from isthmus.recipes.setup.memory_estimate import num_parameters
from isthmus.recipes.setup.model_plan import base_fingerprint, check_best, check_profiled_steps, check_schedule
from isthmus.recipes.setup.model_source import answer_end
from isthmus.recipes.setup.rank_model import RankModel, build_rank_model
from isthmus.recipes.setup.teacher_model import build_teacher
from isthmus.recipes.setup.validation import RunContext, validate
from isthmus.train.loop import Loop, RunData
from isthmus.train.reporter import Reporter, first_valid_loss
from isthmus.train.step_profile import StepProfile
from isthmus.train.stop import StopFlag

_logger = logging.getLogger(__name__)


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

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


def exports_model(config: RunConfig) -> bool:
    """Whether an export has the whole model."""
    return config.checkpoint.export_merged or not config.lora.enabled


def run_recipe(recipe: str, config: RunConfig) -> RunResult:
    """Train and export; a collective."""
    if config.recipe != recipe:
        raise UsageError(
            f"isthmus.{recipe} was given a config of recipe={config.recipe}. Call isthmus.{config.recipe}, or load a "
            f"config for {recipe}."
        )
    with own_algorithms(), StopFlag() as stop:
        try:
            context = _leave_busy_cores(validate(config, ranks_here=rank_env.local_world_size()))
            messages = [*context.messages, *_prepare_process(context)]
            limits = config.parallel
            with join_ranks(
                context.platform, join_timeout_s=limits.join_timeout_s, timeout_s=limits.timeout_s
            ) as machines:
                result = _run_rank(context, [*messages, *([machines] if machines else [])], stop)
        except BaseException as error:
            # NCCL may wait for the other ranks when it closes the groups, before this rank prints its error.
            if rank_env.world_size() == 1 or isinstance(error, Preempted):
                close_groups()
            raise
    close_groups()
    return result


def _leave_busy_cores(context: RunContext) -> RunContext:
    """Leave cores to other processes: on a CPU, threads that wait for busy cores are slower than fewer threads.

    The number of threads affects the last bits of a result. It is chosen when a run begins, and recorded in its config.
    """
    config, run_dir = context.config, context.run_dir
    one_rank = context.platform.device_type == "cpu" and rank_env.world_size() == 1
    if not one_rank or config.train.threads is not None or "OMP_NUM_THREADS" in os.environ:
        return context
    if context.resume is not None:
        recorded = load_config(None, run_dir.config).train.threads if run_dir.config.is_file() else None
        threads, reason = recorded, "as when the run began"
    else:
        available, used = cores(), cores_in_use()
        threads = max(1, available - used) if used else None
        reason = f"other processes use {used} of this machine's {available} cores"
    if threads is None:
        return context
    changed = config.model_copy(update={"train": config.train.model_copy(update={"threads": threads})})
    return replace(context, config=changed, messages=(*context.messages, f"train.threads={threads}: {reason}"))


def _prepare_process(context: RunContext) -> list[str]:
    """Set environment variables, threads and the allocator of this process; returns log messages."""
    config, platform, shape = context.config, context.platform, context.shape
    local_ranks = rank_env.local_world_size()
    on_gpu = platform.device_type == "cuda"
    applied = apply_env(platform, shape, device_known=True)
    environment = [f"{name}={value}: {reason}" for name, (value, reason) in applied.items()]
    messages = [*(environment if on_gpu else ()), *remarks_on(os.environ, shape, on_gpu=on_gpu)]
    if shape.gemm_tuning_file is not None and platform.no_gemm_tuning is not None:
        messages.append(f"train.gemm_tuning=true has no effect: {platform.no_gemm_tuning}")
    if config.train.deterministic:
        messages.append(use_deterministic_algorithms(platform))
    threads = config.train.threads
    if threads is not None:
        torch.set_num_threads(threads)
        messages.append(f"{threads} threads a rank (train.threads)")
    elif platform.device_type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        available = cores()
        threads = max(1, available // local_ranks)
        torch.set_num_threads(threads)
        messages.append(f"{threads} threads a rank ({local_ranks} ranks on this machine's {available} cores)")
    details = platform.prepare_process()
    for detail in () if on_gpu else (*details, *environment):
        _logger.debug(detail)
    return [*messages, *(details if on_gpu else ())]


def _run_rank(context: RunContext, messages: Sequence[str], stop: StopFlag) -> RunResult:
    config, platform = context.config, context.platform
    position = open_groups(config.parallel, platform, seed=config.train.seed, timeout_s=config.parallel.timeout_s)
    with Reporter(
        context.run_dir.root,
        config.logging,
        is_main=position.rank == 0,
        callbacks=config.callbacks,
        device="rank" if platform.device_type == "cpu" else "GPU",
        # Megatron-LM prints on the last rank; its users look for the log on the last machine.
        prints_steps=config.logging.style == "megatron" and rank_env.is_last_of_several_machines(),
    ) as reporter:
        for message in messages:
            reporter.log(message)
        if (repo := config.checkpoint.push) is not None:
            on_rank_0(lambda: check_access(repo), "access to the Hub")
        return _train(_set_up(context, position, reporter, stop), stop)


@dataclass(frozen=True, slots=True)
class _Training:
    """One rank, ready for the first step."""

    context: RunContext
    position: Position
    data: RunData
    model: RankModel
    stepper: Stepper
    reporter: Reporter
    start: int
    """Steps done before, by the run that is resumed."""
    best: save_load.BestLoss
    base: str
    """Fingerprint of the frozen weights of a run with adapters."""

    def save(self, step: int) -> None:
        """Write a checkpoint; a collective."""
        context = self.context
        with trace_region("checkpoint"):
            path = save_load.save(
                context.run_dir.checkpoints,
                self.stepper,
                save_load.Progress(step=step, data=self.data.fingerprint, best=self.best, base=self.base),
                context.plan.parallel,
                keep=context.config.checkpoint.keep,
                keep_best=context.config.checkpoint.keep_best,
                args=checkpoint_args(self.model, step),
                write_beside=lambda folder: write_checkpoint_config(self.model, folder, context.tokenizer),
            )
        self.reporter.saved(step, path)

    def export(self, step: int, *, final: bool = False) -> None:
        """Write the Hugging Face folder of the state after ``step``; a collective."""
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
            export_hf(self.model, path, context.tokenizer, dtype=dtype, replace=True)
            self._write_card(path, step)
        self.reporter.exported(step, path)

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
        folder = save_load.checkpoint_dir(self.context.run_dir.checkpoints, self.best.step or 0)
        save_load.load(folder, self.stepper, self.context.plan.parallel)
        self.reporter.log(f"best: step {self.best.step}, validation loss {self.best.loss:.4f}")


def _set_up(context: RunContext, position: Position, reporter: Reporter, stop: StopFlag) -> _Training:
    """Load the data, build model and optimizer, resume. A failure removes a new run folder."""
    config, run_dir, main = context.config, context.run_dir, position.rank == 0
    text = dump(config)
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
        stepper = stepper_of(config)(model.stages, optimizer, schedule, objective_of(config), teacher)
        if has_reference(config):
            parts = {"train": data.train, "valid": data.valid, "test": data.test}
            fresh = context.resume is None
            compute_reference(stepper, parts, run_dir.reference, position, fresh=fresh, stop=stop, log=reporter.log)
        progress = _resume(context, stepper, data, reporter)
        check_profiled_steps(config, data.steps)
        agree(lambda: run_dir.begin(text, fresh=context.resume is None) if main else None)
    return _Training(context, position, data, model, stepper, reporter, progress.step, progress.best, progress.base)


def _load_data(context: RunContext, position: Position, reporter: Reporter, stop: StopFlag) -> RunData:
    config, plan = context.config, context.plan
    corpus = load_corpus(
        config,
        context.run_dir.data,
        context.tokenizer,
        vocab_size=plan.architecture.vocab_size,
        resume=context.resume,
        stop=stop,
        report=reporter.log,
    )
    dp, eod = config.parallel.dp(plan.world_size), context.tokenizer.eos_id
    device_type = context.platform.device_type
    end = answer_end(plan.source.config, context.tokenizer) if plan.architecture.score_head else None
    train, valid, test = corpus.batches(config, position, dp, eod=eod, device_type=device_type, end=end)
    if config.parallel.pp > 1 and device_type == "cuda" and not pads_to_one_length(config, device_type):
        why = "data.packing=false" if not config.data.packing else "moe.capacity_factor is set"
        reporter.log(f"pipeline: stages exchange the length of each micro batch, because {why}")
    steps = config.train.steps or math.ceil((config.train.epochs or 1) * train.steps_per_epoch)
    if corpus.mixture:
        epochs = ", ".join(f"{name} {epochs:.2f}" for name, epochs in train.epochs(steps).items())
        reporter.log(f"epochs of each set in {steps} steps: {epochs}")
    return RunData(train, valid, test, steps, corpus.fingerprint(config))


def _resume(context: RunContext, stepper: Stepper, data: RunData, reporter: Reporter) -> save_load.Progress:
    """The progress of the loaded checkpoint, or step 0."""
    base = base_fingerprint(context.config, context.plan)
    if context.resume is None:
        return save_load.Progress(step=0, data=data.fingerprint, base=base)
    with trace_region("loading the checkpoint"):
        progress = save_load.load(context.resume, stepper, context.plan.parallel)
    check_fingerprint(progress.data, data.fingerprint, context.resume)
    if progress.base != base:
        raise DataError(
            f"{context.resume} has adapters of another model than {context.plan.source}. Restore the model of this "
            "run, or start a new one with --out."
        )
    reporter.log(f"resumed from {context.resume} at step {progress.step}")
    if progress.step > data.steps:
        raise UsageError(
            f"{context.resume} is at step {progress.step}, beyond this run's {data.steps} steps. Raise train.steps."
        )
    return progress


def _train(training: _Training, stop: StopFlag) -> RunResult:
    context, start, steps = training.context, training.start, training.data.steps
    config, reporter = context.config, training.reporter
    reporter.log(_describe(training))
    settings = {name: value for name, value, _ in origins_of(config.model_dump(mode="json"), {})}
    reporter.begin(total_steps=steps, start=start, settings=settings)
    profiled = config.train.profiled_steps
    if profiled and profiled[-1] <= start < steps:
        reporter.log(f"train.profile={config.train.profile}: these steps are done already; no step is profiled")
    loop = _build_loop(training)
    before = loop.evaluate(start) if start < steps else None
    outcome = loop.run(start, stop)
    if config.checkpoint.save_final and start < outcome.last_step:
        training.save(outcome.last_step)
    best, exported_step = training.best, outcome.last_step
    if config.checkpoint.keep_best and best.step is not None and best.step != outcome.last_step:
        training.load_best()
        exported_step = best.step
    if config.checkpoint.export_final:
        training.export(exported_step, final=True)
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
    )


def _describe(training: _Training) -> str:
    """Steps, epochs, tokens of a step and parameters."""
    plan, data = training.context.plan, training.data
    epochs = f"{data.steps * data.train.global_batch_size / data.train.sequences_per_epoch:.3g} epochs"
    total, trained = (num_parameters(plan.family, plan.architecture, frozen) for frozen in ((), plan.frozen))
    trained += 0 if plan.adapters is None else plan.adapters.num_parameters
    return (
        f"training: {data.steps} steps, {'random tokens' if training.context.config.data.mock else epochs}, "
        f"{data.train.tokens_per_step:,.0f} tokens per step; {total:,} parameters, {trained:,} trainable"
    )


def _build_loop(training: _Training) -> Loop:
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
        best=training.best,
        eval_objective=eval_objective_of(context.config),
        answer=training.answer,
        save=training.save,
        export=training.export,
    )
