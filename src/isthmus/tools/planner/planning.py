"""Plans for a model on a machine: loads its config without weights, searches, and names what is nearest."""

from __future__ import annotations

import math
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from isthmus.config.load import load_config, load_settings
from isthmus.config.presets import is_model_file, preset_of_id
from isthmus.config.schema import ParallelConfig, RunConfig
from isthmus.errors import IOFailure, MissingInput, UsageError, escaped
from isthmus.platforms.detect import gpu_supports
from isthmus.recipes.model.rank_model import DTYPES
from isthmus.recipes.plan.memory_estimate import MOMENT_BYTES
from isthmus.recipes.plan.model_plan import ModelPlan, check_training_settings, open_run_model, plan_model
from isthmus.recipes.plan.parameter_counts import num_parameters
from isthmus.tools.planner.cost.long_run import LongRun, long_run
from isthmus.tools.planner.planned_gpus import PlannedGpus
from isthmus.tools.planner.search import Candidate, Search

_STEP_TOKENS = 1 << 22
"""Most tokens of a step if the batch size is not given."""
_LEAST_BATCH = 16
_MOST_RANKS = 1 << 14
_LEAST_LENGTH = 512


@dataclass(frozen=True, slots=True)
class Plans:
    """The result of ``isthmus plan``."""

    model: str
    config: RunConfig
    """The run, with the layout of its settings."""
    plan: ModelPlan
    machine: PlannedGpus
    precision: str
    parameters: int
    best: Sequence[Candidate]
    """From the fastest; empty if nothing fits."""
    evaluated: int
    """Memory estimates that were computed."""
    closest: Candidate | None
    """If nothing fits: the layout that needs the least memory."""
    suggestions: Sequence[str]
    """If nothing fits: changes with which the run fits."""


def make_plans(
    model: str | None,
    file: Path | None,
    overrides: Sequence[str],
    machine: PlannedGpus,
    *,
    recipe: str | None = None,
    number: int = 5,
) -> Plans:
    """Plan a run of ``model`` on ``machine``.

    Args:
        model: Hugging Face folder or ``config.json``, Hub id, preset or YAML; None: that of the settings.
        file: config of the run, or None. Its settings, and ``overrides``, are fixed in all plans.
        overrides: ``key=value``.
        machine: the GPUs.
        recipe: of a run without a config file; None: pretrain.
        number: of plans.

    Raises:
        UsageError: a setting, or every layout, is refused.
    """
    config, fixed = load_request(model, file, overrides, machine, recipe)
    config, plan = _open_or_preset(config, machine)
    precision = _precision(config, machine)
    search = Search(plan, config, precision, machine, fixed)
    best = search.best(number)
    suggestions = () if best else _suggestions(search)
    parameters = num_parameters(plan.family, plan.architecture)
    return Plans(
        model or config.model.path or "model.config",
        config,
        plan,
        machine,
        precision,
        parameters,
        best,
        search.evaluated,
        None if best else search.closest,
        suggestions,
    )


def long_run_of(plans: Plans, candidate: Candidate) -> LongRun | None:
    """Start, saves and failures of a plan; None without step times, and on one node."""
    machine, config, time = plans.machine, candidate.config, candidate.time
    if machine.cluster is None or time is None or machine.nodes == 1:
        return None
    parallel, element = config.parallel, DTYPES[plans.precision].itemsize
    ranks = parallel.shards(machine.world_size) if parallel.fsdp else 1
    replicas = machine.world_size // (parallel.tp * parallel.pp) // ranks
    trained = plans.parameters
    if config.lora.enabled:
        trained = candidate.memory.gradients // 4 * parallel.tp * parallel.pp
    return long_run(
        machine.cluster,
        time.total_s,
        weight_bytes=element * plans.parameters,
        weight_copies=min(replicas, machine.nodes),
        state_bytes=(element + 4 + MOMENT_BYTES[config.optim.optimizer]) * trained,
        storage_gb_s=machine.storage_gb_s,
        failure_s=None if machine.failure_hours is None else 3600 * machine.failure_hours,
    )


def load_request(
    model: str | None, file: Path | None, overrides: Sequence[str], machine: PlannedGpus, recipe: str | None = None
) -> tuple[RunConfig, frozenset[str]]:
    """The config of the run, and the dotted names of the settings that were given."""
    settings = load_settings(None, file, overrides, check=False).values
    flags = _model_flags(model, settings)
    flags |= {"out": None if "out" in settings else "run"}
    if not {"files", "sets", "mock"} & (settings.get("data") or {}).keys():
        flags["data"] = ["data"]
    train, length = settings.get("train") or {}, (settings.get("data") or {}).get("seq_length", 2048)
    if "global_batch_size" not in train and isinstance(length, int) and length > 0:
        flags["train.global_batch_size"] = _batch_size(machine.world_size, length)
    if is_model_file(str((settings.get("distill") or {}).get("teacher", ""))):
        flags["distill.teacher_init"] = "random"
    config = load_config(settings.get("recipe") or recipe or "pretrain", file, overrides, flags)
    if recipe is not None and config.recipe != recipe:
        raise UsageError(f"--recipe {recipe}, but {file} is for {config.recipe}. Leave --recipe out.")
    sections = ((name, values) for name, values in settings.items() if isinstance(values, dict))
    return config, frozenset(f"{name}.{setting}" for name, values in sections for setting in values)


def _batch_size(world_size: int, seq_length: int) -> int:
    """A sequence for each GPU within the limits, with the odd factor of their number: else few layouts divide it."""
    odd = world_size // (world_size & -world_size)
    sequences = min(world_size, _STEP_TOKENS // seq_length)
    return odd << max((max(sequences, 1) // odd).bit_length() - 1, math.ceil(math.log2(_LEAST_BATCH / odd)), 0)


def _model_flags(model: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Weights are not read: they are random for the plan."""
    known = settings.get("model")
    if model is None and not (
        isinstance(known, str) or (isinstance(known, dict) and {"path", "config"} & known.keys())
    ):
        raise UsageError(
            "which model is the plan for? Name it: a Hugging Face folder, its config.json, or preset:NAME."
        )
    if model is not None and model.lower().endswith(".json"):
        path = Path(model)
        if path.name != "config.json":
            raise UsageError(f"{model} is not named config.json. Rename it, or give the folder of the model.")
        model = str(path.parent)
    return {"model": model, "model.init": "random"}


def _open_or_preset(config: RunConfig, machine: PlannedGpus) -> tuple[RunConfig, ModelPlan]:
    """The model of the config; that of the preset if the id is not in the Hub cache and the Hub is not reachable."""
    try:
        return config, _open(config, machine)
    except (MissingInput, IOFailure):
        preset = preset_of_id(config.model.path or "")
        if preset is None:
            raise
    line = f"{config.model.path} cannot be downloaded: the plan uses {preset}"
    print(escaped(line), file=sys.stderr, flush=True)
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": preset})})
    return config, _open(config, machine)


def _open(config: RunConfig, machine: PlannedGpus) -> ModelPlan:
    """The model on one rank of each replica; the search sets the layout."""
    alone = config.model_copy(update={"parallel": ParallelConfig(fsdp=config.parallel.fsdp)})
    plan = plan_model(open_run_model(alone), alone, world_size=machine.world_size)
    check_training_settings(alone, plan)
    return plan


def _precision(config: RunConfig, machine: PlannedGpus) -> str:
    peaks = None if machine.part is None else machine.part.peak_tflops
    chosen = config.train.precision or ("bf16" if peaks is None or "bf16" in peaks else "fp32")
    if peaks is not None and chosen not in peaks:
        assert machine.part is not None
        others = " or ".join(name for name in peaks if name != "tf32")  # which is no precision of a run
        raise UsageError(f"train.precision={chosen}: {machine.part.name} has no {chosen} matrix cores. Use {others}.")
    scaling = config.train.fp8_scaling
    if machine.part is not None and chosen == "fp8" and scaling not in ("tensorwise", "rowwise"):
        supported, reason = gpu_supports(machine.part.arch, scaling)
        if not supported:
            raise UsageError(
                f"train.fp8_scaling={scaling}: {machine.part.name} cannot run it, {reason}. Use tensorwise or rowwise."
            )
    return chosen


def _suggestions(search: Search) -> list[str]:
    """What makes the run fit, each by itself."""
    suggestions = [_more_gpus(search)]
    free = frozenset(name for name in search.fixed if not name.startswith(("parallel.", "train.recompute")))
    if len(free) < len(search.fixed):
        config = search.config.model_copy(update={"parallel": ParallelConfig()})
        suggestions.append(_attempt("without the given layout", search, config, search.machine, free))
    suggestions.append(_shorter(search))
    if not search.config.lora.enabled:
        lora = search.config.lora.model_copy(update={"rank": 16})
        config = search.config.model_copy(update={"lora": lora})
        suggestions.append(_attempt("with lora.rank=16", search, config, search.machine, search.fixed))
    return [text for text in suggestions if text is not None]


def _more_gpus(search: Search) -> str | None:
    machine = search.machine
    while machine.world_size * 2 <= _MOST_RANKS:
        if machine.gpus_per_node < 8:
            machine = replace(machine, gpus_per_node=machine.gpus_per_node * 2)
        else:
            machine = replace(machine, nodes=machine.nodes * 2)
        if text := _attempt(f"on {machine}", search, search.config, machine, search.fixed):
            return text
    return None


def _shorter(search: Search) -> str | None:
    length = search.config.data.seq_length
    while (length := length // 2) >= _LEAST_LENGTH:
        data = search.config.data.model_copy(update={"seq_length": length})
        config = search.config.model_copy(update={"data": data})
        if text := _attempt(f"with data.seq_length={length}", search, config, search.machine, search.fixed):
            return text
    return None


def _attempt(what: str, search: Search, config: RunConfig, machine: PlannedGpus, fixed: Collection[str]) -> str | None:
    """``what`` and the layout, if a run fits."""
    try:
        plan = search.plan if config.lora == search.config.lora else _open(config, machine)
        best = Search(plan, config, search.precision, machine, fixed).best(1)
    except UsageError:
        return None
    if not best:
        return None
    return f"{what}: {describe(best[0], machine)}, {best[0].total_bytes / 2**30:.1f} GiB"


def describe(candidate: Candidate, machine: PlannedGpus) -> str:
    """Layout, micro batch size and recomputation in one line."""
    train, parallel = candidate.config.train, candidate.config.parallel
    layers = "" if train.recompute_layers is None else f" of {train.recompute_layers} layers"
    recompute = "" if train.recompute == "none" else f", recompute={train.recompute}{layers}"
    offload = ", optim.offload" if candidate.config.optim.offload else ""
    return f"{parallel.describe(machine.world_size)}, micro batch {train.micro_batch_size}{recompute}{offload}"
