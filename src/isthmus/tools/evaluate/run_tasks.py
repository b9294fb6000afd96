"""Evaluates a Hugging Face folder or a checkpoint on tasks, in any layout, without exporting it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from isthmus.config.load import load_config
from isthmus.config.schema import RunConfig
from isthmus.convert.checkpoint_source import CheckpointSource
from isthmus.convert.hf.hf_weights import OpenedHfWeights
from isthmus.convert.open_model import checkpoint_config, checkpoint_folder, open_model
from isthmus.engine.generation.inference import SharedInference
from isthmus.engine.parallel.process_groups import close_groups
from isthmus.engine.step import Evaluator
from isthmus.errors import MissingInput, UsageError
from isthmus.extras import check_installed
from isthmus.hf.hub import reaches_hub
from isthmus.launch.rendezvous import join_ranks
from isthmus.platforms import rank_env
from isthmus.platforms.detect import detect
from isthmus.recipes.data.eval_prompts import end_tokens
from isthmus.recipes.model.load_model import check_is_folder
from isthmus.recipes.model.model_source import run_tokenizer
from isthmus.recipes.model.rank_model import join_and_build
from isthmus.recipes.plan.layout_checks import check_fsdp_precision, check_fsdp_torch
from isthmus.recipes.plan.model_plan import ModelPlan, check_precision, open_run_model, plan_model
from isthmus.recipes.run_dir import exported_model
from isthmus.tools.evaluate.task_settings import TaskSettings

_SETTINGS = ("parallel.", "tokenizer.", "model.trust_remote_code", "train.precision", "train.attention", "platform")
"""Settings that an evaluation uses."""


def evaluate_tasks(settings: TaskSettings, overrides: Sequence[str] = ()) -> tuple[dict[str, Any], str] | None:
    """Results in lm_eval's format and its tables; None on the other ranks. A collective.

    Raises:
        UsageError: lm_eval is not installed, a setting has no effect, a task is unknown or the layout does not fit.
        MissingInput, DataError: the model is missing or damaged.
    """
    check_installed("isthmus eval", "lm_eval")
    for word in overrides:
        if "=" not in word:
            raise UsageError(f"{word!r} is not a setting (key=value). Name one model, then options and settings.")
        if not word.startswith(_SETTINGS):
            raise UsageError(f"{word.partition('=')[0]} has no effect on an evaluation. Leave it out.")
    config, plan = plan_of(settings.model, overrides)
    positions = plan.architecture.max_position_embeddings
    longest = settings.max_length or positions
    if longest > positions and plan.architecture.embedding.position == "learned":
        raise UsageError(f"--max-length {longest} is more than the {positions} learned positions of this model.")
    platform = detect(config.platform)
    precision = config.train.precision or platform.default_precision()[0]
    check_precision(platform, precision)
    check_fsdp_precision(config.parallel, precision)
    check_fsdp_torch(config.parallel)
    tokenizer = run_tokenizer(config, plan.source, plan.architecture.vocab_size)
    manager = _tasks_without_network(settings) if rank_env.rank() <= 0 else None
    limits = config.parallel
    with join_ranks(platform, join_timeout_s=limits.join_timeout_s, timeout_s=limits.timeout_s):
        model = join_and_build(config, plan, platform, precision, training=False)
        inference = SharedInference(
            Evaluator(model.stages), plan.architecture, plan.parallel, batch_tokens=settings.batch_tokens
        )
        results = None
        if model.position.rank:
            inference.serve()
        else:
            with inference:  # also the import: the other ranks wait for the end of the block
                from isthmus.tools.evaluate.harness_model import run_harness

                ends = end_tokens(plan.source, tokenizer)
                results = run_harness(settings, inference, tokenizer, ends=ends, max_length=longest, manager=manager)
    close_groups()
    return results


def _tasks_without_network(settings: TaskSettings) -> Any:
    """The task manager if the Hub does not answer: a missing data set is then found before the model is built."""
    if reaches_hub():
        return None
    from isthmus.tools.evaluate.harness_model import cached_tasks  # slow

    return cached_tasks(settings)


def plan_of(model: str, overrides: Sequence[str]) -> tuple[RunConfig, ModelPlan]:
    """The settings and the model; the weights of a checkpoint are read from it, without converting it."""
    check_is_folder(model)
    path = Path(model)
    is_checkpoint = path.is_dir() and checkpoint_folder(path) is not None
    exported = exported_model(path)
    folder: Path | str = model if exported == path else exported
    if is_checkpoint:
        inner = checkpoint_config(path)
        if inner is None:
            raise MissingInput(
                f"{path} has no config and tokenizer beside its weights. Convert it with those of its model, then "
                f"evaluate the result: isthmus convert {path} DST --to hf --hf-like DIR"
            )
        folder = inner
    flags = {"model": str(folder), "data": ["unused"], "out": "unused"}
    config = load_config("pretrain", None, overrides, flags)
    plan = plan_model(open_run_model(config), config)
    if not is_checkpoint:
        return config, plan
    opened = open_model(path)
    return config, replace(plan, weights=OpenedHfWeights(CheckpointSource(opened), opened.arch, opened.notes))
