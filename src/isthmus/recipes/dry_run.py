"""``--dry-run``: everything of a run that can be checked without training; nothing is written."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

from isthmus.config.presets import is_model_file
from isthmus.config.schema import RunConfig
from isthmus.engine.checkpoint.checkpoint_store import address_of
from isthmus.engine.parallel.process_groups import FIRST_RANK
from isthmus.errors import UsageError, counted
from isthmus.files.checked_files import trusting
from isthmus.hf.hub import check_access, fetch, looks_like_id
from isthmus.hf.model_folder import ModelFolder
from isthmus.platforms.base import Platform
from isthmus.recipes.build import run_data
from isthmus.recipes.data.corpus import compare_data
from isthmus.recipes.data.data_notes import epochs_note, epochs_text, few_steps_note
from isthmus.recipes.data.data_sources import Report, data_settings, find_data_sources
from isthmus.recipes.data.default_batch import default_batch_size, total_steps
from isthmus.recipes.data.first_records import estimate_data, known_corpus
from isthmus.recipes.plan.model_plan import check_best, check_profiled_steps, check_schedule
from isthmus.recipes.plan.resume_check import checked_record
from isthmus.recipes.plan.validation import RunContext, validate
from isthmus.recipes.registry import recipe_of
from isthmus.recipes.run_result import describe, describe_parameters, step_tokens


def dry_run(
    config: RunConfig,
    *,
    world_size: int,
    ranks_here: int,
    report: Report,
    machine: Platform | None = None,
    runs_here: bool = True,
) -> None:
    """Check a run and report its size: parameters, memory, steps and tokens.

    Steps and tokens are exact for prepared data, mock data and ``train.steps``, else estimated from the first records.

    Args:
        config: of the run.
        world_size: ranks of the run.
        ranks_here: how many of them run on this machine.
        report: is called with each line.
        machine: on which the run is to be, if it is another one.
        runs_here: what this machine lacks is an error; False: if it has no GPU, such as a login machine, a warning.

    Raises:
        IsthmusError: the first error of the run, with its exit code.
    """
    with trusting(config.checkpoint.skip_checksums):
        here = _without_downloads(config, report)
        unmet: list[str] | None = None if runs_here or machine or config.platform == "cpu" else []
        context = validate(here, world_size=world_size, ranks_here=ranks_here, machine=machine, unmet=unmet)
        for message in context.messages:
            report(message)
        for error in unmet or ():
            report(f"warning: would fail on this machine, which has no GPU: {error}")
        if unmet:
            report("warning: --gpus, such as --gpus 8xMI300X, checks the run against the machine that it is for")
        if here.model.init == config.model.init:
            for message in checked_record(context)[1]:
                report(message)
        if context.resume is not None:
            if not config.data.mock:
                compare_data(
                    data_settings(config),
                    find_data_sources(config),
                    context.run_dir.data,
                    context.tokenizer,
                    context.resume,
                )
            report(f"resumes from {address_of(context.resume)}")
        if (repo := config.checkpoint.push) is not None:
            check_access(repo)
        report(_size(context, report))


def _size(context: RunContext, report: Report) -> str:
    config, tokenizer = context.config, context.tokenizer
    vocab_size = context.plan.architecture.vocab_size
    corpus = known_corpus(config, tokenizer, vocab_size=vocab_size, report=report)
    if corpus is not None:
        data = run_data(context, corpus, FIRST_RANK, report)
        check_schedule(config, data.steps)
        check_best(config, has_validation=data.valid is not None)
        check_profiled_steps(config, data.steps)
        most = "up to " if recipe_of(config).generates_answers else ""
        return f"{describe(context, data)}; {most}{data.steps * data.train.tokens_per_step:,.0f} tokens in all"
    estimate = estimate_data(config, tokenizer, report)
    parameters, steps_setting = describe_parameters(context.plan), config.train.steps
    if estimate is None:
        steps_known = "steps as many as the data has" if steps_setting is None else counted(steps_setting, "step")
        return f"training: {steps_known}; {parameters}; the tokens of this data are known when it is tokenized"
    batch = default_batch_size(config, estimate.sequences, config.parallel.dp(context.plan.world_size))
    epoch, steps = math.ceil(estimate.sequences / batch), total_steps(config, estimate.sequences, batch)
    for check in (check_schedule, check_profiled_steps):
        try:
            check(config, steps)
        except UsageError as error:
            report(f"the run may fail after it has tokenized the data: {error}")
    if batch != config.train.global_batch_size:
        report(f"train.global_batch_size is about {batch} instead of the default, since the data has few sequences")
    for note in [*epochs_note(config, steps / epoch), *few_steps_note(config, steps, batch, round(estimate.sequences))]:
        report(f"note: {note}")
    tokens_per_step = estimate.tokens / estimate.sequences * batch
    return (
        f"training: {'' if steps_setting else 'about '}{counted(steps, 'step')}, about "
        f"{epochs_text(config, steps / epoch)}, {step_tokens(config, tokens_per_step, estimated=True)} and "
        f"{steps * tokens_per_step:,.0f} in all, estimated from the first records; {parameters}"
    )


def _without_downloads(config: RunConfig, report: Report) -> RunConfig:
    """The config with the folders of models on the Hub; weights that are not in its cache are not downloaded."""
    code = config.model.trust_remote_code

    def local(path_or_id: str | None, init: Literal["hf", "random"]) -> tuple[str | None, Literal["hf", "random"]]:
        if (
            path_or_id is None
            or is_model_file(path_or_id)
            or Path(path_or_id).exists()
            or not looks_like_id(path_or_id)
        ):
            return path_or_id, init
        folder = fetch(path_or_id, weights=False, code=code, report=report)
        if init == "random" or ModelFolder.open(folder).has_weights:
            return str(folder), init
        report(
            f"{path_or_id}: its weights are not in the Hub cache; the run downloads them, and they are not checked here"
        )
        return str(folder), "random"

    path, init = local(config.model.path, config.model.init)
    teacher, teacher_init = local(config.distill.teacher, config.distill.teacher_init)
    model = config.model.model_copy(update={"path": path, "init": init})
    distill = config.distill.model_copy(update={"teacher": teacher, "teacher_init": teacher_init})
    return config.model_copy(update={"model": model, "distill": distill})
