"""From a config to a measured file."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from isthmus.config.load import load_config, load_settings
from isthmus.config.schema import RunConfig
from isthmus.engine.linear.tuned_matmuls import read_tuned
from isthmus.engine.moe.gemm_choice import time_gemms
from isthmus.engine.moe.grouped_gemm import unsupported_reason
from isthmus.errors import IsthmusError, OutputExists, disk_errors
from isthmus.families.rules.shard import local_shape
from isthmus.platforms.base import Platform
from isthmus.platforms.detect import detect
from isthmus.recipes.model.rank_model import DTYPES
from isthmus.recipes.plan.model_plan import ModelPlan, check_precision, open_run_model, plan_model
from isthmus.recipes.plan.step_matmuls import check_tuning, first_layout, step_matmuls, token_counts
from isthmus.recipes.registry import recipe_of
from isthmus.tools.tune.choose import Report, TuneResult, choose, with_shorter

_WITHOUT_DATA: Mapping[str, Any] = {"data.files": ["unused"]}


def config_to_tune(file: Path | None, overrides: Sequence[str], model: str | None) -> RunConfig:
    """The settings of a run; recipe, output folder and data may be missing. Weights are not read."""
    settings = load_settings(None, file, overrides, {"model": model}, check=False).values
    flags: dict[str, Any] = {"model": model, "model.init": "random"}
    if "recipe" not in settings:
        flags["recipe"] = "pretrain"
    if "out" not in settings:
        flags["out"] = "tune"
    if not any(settings.get("data", {}).get(name) for name in ("files", "sets", "mock")):
        flags |= _WITHOUT_DATA
    return load_config(None, file, overrides, flags)


def tune_run(config: RunConfig, out: Path | None, report: Report) -> tuple[TuneResult, Path]:
    """Measure the matmuls of a run and write the file.

    Args:
        config: settings of the run.
        out: the file; None: ``tune.json`` in the working folder, ``tune.csv`` for AMD GPUs.
        report: is called with each line of progress.

    Raises:
        OutputExists: the file exists and is none of ``isthmus tune``.
        NoSpace: the disk is full.
        IOFailure: the file cannot be written.
        UsageError: the layout has other matmuls than those that can be chosen for.
    """
    from isthmus.files.atomic_write import write_atomic

    platform = detect(config.platform)
    for_tunable_op = platform.name == "rocm"
    path = out or Path("tune.csv" if for_tunable_op else "tune.json")
    _check_out(path)
    check_tuning(config, platform, for_tunable_op=for_tunable_op)
    precision = config.train.precision or platform.default_precision()[0]
    train = config.train
    check_precision(platform, precision, emulate_fp8=train.emulate_fp8, fp8_scaling=train.fp8_scaling)
    plan = plan_model(open_run_model(config), config, world_size=_world_size(config))
    tokens = token_counts(config)
    # The windows of pretraining and random tokens fill a sequence.
    exact = bool(config.data.length_buckets) or config.data.mock or recipe_of(config).records.is_text
    if not exact and not for_tunable_op:
        tokens = with_shorter(tokens, config.parallel.length_multiple)
    matmuls = step_matmuls(plan, config, precision, platform, tokens)
    report(f"{platform.describe()}: {len(matmuls)} matmuls of {precision}, {', '.join(map(str, tokens))} tokens")
    result = choose(matmuls, platform, report)
    write_atomic(path, result.content)
    notes = _notes(config, precision, platform, exact=exact)
    if plan.architecture.moe is not None:
        notes.append(_expert_note(plan, platform, precision, tokens[-1]))
    return replace(result, notes=[*result.notes, *notes]), path


def _notes(config: RunConfig, precision: str, platform: Platform, *, exact: bool) -> list[str]:
    """What the file does not cover."""
    notes = []
    if platform.name == "rocm" and not exact:
        longest = token_counts(config)[-1] * config.parallel.cp
        notes.append(
            f"TunableOp knows exact shapes only, and micro batches of this data differ in length: set "
            f"data.length_buckets=[{longest}] or several buckets, and run isthmus tune again"
        )
    if precision == "fp8":
        notes.append("FP8 matmuls are not measured: torch selects their kernels")
    if config.lora.enabled:
        notes.append("matmuls of adapters are small and not measured")
    return notes


def _expert_note(plan: ModelPlan, platform: Platform, precision: str, tokens: int) -> str:
    """The grouped GEMMs of the experts at a uniform load, which a run on a GPU times at its start."""
    arch, parallel = plan.architecture, plan.parallel
    assert arch.moe is not None
    experts = {name: placed.rule for name, placed in plan.family.placements(arch).items() if placed.rule.is_expert}
    rules = {name.rpartition("linear_")[2]: rule for name, rule in experts.items()}
    shapes = tuple(local_shape(rules[name], arch, first_layout(plan)) for name in ("fc1.weight", "fc2.weight"))
    number, rows = arch.moe.num_experts // parallel.ep, tokens * arch.moe.top_k
    what = f"experts: {number} of {' and '.join(f'{n} x {k}' for n, k in shapes)}"
    reason = unsupported_reason(shapes[0], DTYPES[precision]) or unsupported_reason(shapes[1], DTYPES[precision])
    if platform.device_type == "cpu" or reason is not None:
        return f"{what}: a loop of GEMMs, whose rows differ in each micro batch; not measured"
    timings = time_gemms(number, shapes, max(rows, number), torch.device("cuda"))
    return f"{what}: {'; '.join(map(str, timings))}. Each run measures it at its start"


def _world_size(config: RunConfig) -> int:
    """The smallest number of ranks that the layout divides."""
    parallel = config.parallel
    stage = parallel.tp * parallel.cp
    return math.lcm(stage, parallel.expert_tp * parallel.ep) * parallel.pp


def _check_out(path: Path) -> None:
    """Before the measurements, which would be lost."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    if not path.exists():
        return
    try:
        read_tuned(path)
    except IsthmusError:
        raise OutputExists(f"{path} exists and is no file of isthmus tune. Choose another name with --out.") from None
