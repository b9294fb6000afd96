"""Plans as a table, as formulae with numbers, and as JSON."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from isthmus.config.schema import RunConfig
from isthmus.recipes.plan.activation_estimate import activations
from isthmus.recipes.plan.memory_estimate import DTYPES, estimate_ranks
from isthmus.recipes.registry import recipe_of
from isthmus.tools.planner.cost.long_run import LongRun
from isthmus.tools.planner.cost.step_time import FORMULAS
from isthmus.tools.planner.planned_gpus import CONTEXT_BYTES, FRAGMENTATION
from isthmus.tools.planner.planning import Plans, describe, long_run_of
from isthmus.tools.planner.search import Candidate, plan_of

_TIGHT = 0.03
"""Share of a GPU's memory; a plan that leaves less free has a warning."""
_LAYOUT = ("tp", "sp", "pp", "vpp", "cp", "ep", "etp", "fsdp", "fsdp_reduce")
_ALWAYS = ("tp", "pp", "micro_batch_size", "global_batch_size", "seq_length")
_TRAIN = ("global_batch_size", "micro_batch_size", "recompute", "recompute_modules", "recompute_layers", "precision")


def settings_of(config: RunConfig) -> dict[str, Any]:
    """The settings that a plan chooses, by dotted name; those with their default value are left out."""
    sections: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
        ("parallel", config.parallel, _LAYOUT),
        ("train", config.train, _TRAIN),
        ("optim", config.optim, ("offload",)),
        ("data", config.data, ("seq_length",)),
    )
    settings: dict[str, Any] = {}
    for section, values, names in sections:
        for name in names:
            value, always = getattr(values, name), name in _ALWAYS
            if always or value != type(values).model_fields[name].get_default(call_default_factory=True):
                settings[f"{section}.{name}"] = list(value) if isinstance(value, tuple) else value
    return settings


def as_words(config: RunConfig) -> str:
    """The settings of a plan as words of a command line."""
    return shlex.join(_setting_words(config))


def as_command(plans: Plans, candidate: Candidate, given: Sequence[str]) -> str:
    """The command that runs a plan, for a shell.

    Args:
        plans: the result.
        candidate: the plan.
        given: config file and ``key=value`` of the user; all of them are in the command.
    """
    config, machine = candidate.config, plans.machine
    planned = _setting_words(config)
    replaced = {"recipe", "model", "model.path", *(word.partition("=")[0] for word in planned)}
    settings = [word for word in given if "=" in word and word.partition("=")[0] not in replaced]
    words = [config.recipe, *(word for word in given if "=" not in word)]
    if config.model.path is not None:
        words += ["--model", plans.model.removesuffix("/config.json")]
    if config.data.files == ("data",):
        words += ["--data", "DATA"]
    if machine.nodes == 1:
        return shlex.join(["isthmus", *words, "--nproc", str(machine.gpus_per_node), *settings, *planned])
    start = f"torchrun --nnodes {machine.nodes} --nproc-per-node {machine.gpus_per_node} --node-rank $NODE_RANK"
    run = shlex.join(["-m", "isthmus", *words, *settings, *planned])
    return f"{start} --master-addr $MASTER_ADDR --master-port 29500 {run}"


def _setting_words(config: RunConfig) -> list[str]:
    def text(value: Any) -> str:
        if isinstance(value, bool):
            return str(value).lower()
        return f"[{', '.join(value)}]" if isinstance(value, list) else str(value)

    return [f"{name}={text(value)}" for name, value in settings_of(config).items()]


def memory_parts(candidate: Candidate) -> dict[str, int]:
    """Bytes of the GPU that needs most, by part; of logits and layer buffers only the larger one counts."""
    memory = candidate.memory
    at_loss = memory.logits > memory.temporary
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
        "teacher": memory.teacher,
        "copies_of_the_policy": memory.reference,
        "activations": memory.activations,
        "fp8_weights": memory.quantized,
        "logits": memory.logits if at_loss else 0,
        "layer_buffers": 0 if at_loss else memory.temporary,
        "fragmentation": candidate.fragmentation,
        "context": CONTEXT_BYTES,
    }
    return {name: number for name, number in parts.items() if number or name in ("logits", "layer_buffers")}


def as_json(plans: Plans) -> dict[str, Any]:
    """Everything of a result."""

    def described(candidate: Candidate) -> dict[str, Any]:
        time = candidate.time
        step = (
            None
            if time is None
            else {
                "seconds": time.total_s,
                "tokens_per_s": time.tokens_per_s,
                "mfu": time.mfu,
                "shares": time.shares,
                "bound_by": time.binds,
                "parts_s": time.parts,
                "sent_bytes": {kind: asdict(sent) for kind, sent in time.sent.items()},
            }
        )
        run = long_run_of(plans, candidate)
        memory = {**memory_parts(candidate), "total": candidate.total_bytes}
        if candidate.memory.states:
            memory |= {"training": candidate.memory.training, "generation": candidate.memory.generation}
        host = {"host": candidate.memory.offloaded} if candidate.memory.offloaded else {}
        result = {"settings": settings_of(candidate.config), "memory_bytes": memory | host, "step": step}
        return result if run is None else {**result, "run": asdict(run)}

    machine = plans.machine
    return {
        "model": plans.model,
        "family": plans.plan.family.name,
        "parameters": plans.parameters,
        "recipe": plans.config.recipe,
        "precision": plans.precision,
        "gpus": machine.world_size,
        "gpu": None if machine.part is None else machine.part.name,
        "gpu_memory_bytes": machine.memory_bytes,
        "evaluated": plans.evaluated,
        "plans": [described(candidate) for candidate in plans.best],
        "closest": None if plans.closest is None else described(plans.closest),
        "suggestions": list(plans.suggestions),
    }


def as_text(plans: Plans, *, explained: bool, given: Sequence[str] = ()) -> str:
    """The table of plans, then memory, time and command of the first one; or what is nearest."""
    config, machine = plans.config, plans.machine
    lines = [
        f"{plans.model}: {plans.plan.family.name}, {plans.parameters:,} parameters; {config.recipe} in "
        f"{plans.precision}, {config.train.global_batch_size} sequences of {config.data.seq_length:,} tokens a step, "
        f"on {machine}",
        "",
    ]
    if not plans.best:
        return "\n".join([*lines, *_nearest(plans)])
    best = plans.best[0]
    lines += [*_table(plans), "", "memory of plan 1, GiB of the GPU that needs most:"]
    lines += _columns({name.replace("_", " "): f"{_gib(number)}" for name, number in memory_parts(best).items()})
    if best.memory.states:
        training, generation = _gib(best.memory.training), _gib(best.memory.generation)
        lines.append(f"  {training} in training; {generation} in generation, with {_gib(best.memory.states)} of states")
    if best.memory.offloaded:
        lines.append(f"  and {_gib(best.memory.offloaded)} of host memory for each GPU")
    if best.total_bytes > (1 - _TIGHT) * machine.memory_bytes:
        lines.append(f"  within {_TIGHT:.0%} of the memory of the GPU: the estimate may be too low by as much")
    if best.time is not None:
        share = {name: seconds for name, seconds in best.time.parts.items() if seconds >= 0.001 * best.time.total_s}
        lines += ["", "step of plan 1, estimated seconds:", *_columns({name: f"{s:.3f}" for name, s in share.items()})]
        shares = {name: f"{part:.0%}" for name, part in best.time.shares.items() if part >= 0.005}
        lines += [f"  MFU {best.time.mfu:.1%}; shares of the time:", *_columns(shares)]
        if recipe_of(config).generates_answers and config.rollout.engine != "native":
            lines.append("  without generation and the transfer of weights: servers on other GPUs generate")
    else:
        lines += ["", "no step times, because the GPU is not known: give --gpus, such as --gpus 8xH100"]
    if (run := long_run_of(plans, best)) is not None:
        lines += ["", *_network(plans, best), "", *_long_run(run, plans, best)]
    if explained:
        lines += ["", *explain(plans, best)]
    lines += ["", "settings of plan 1:", f"  {as_words(best.config)}"]
    where = "command of plan 1" if machine.nodes == 1 else f"command of plan 1, on each of {machine.nodes:,} nodes"
    command = as_command(plans, best, given)
    lines += ["", f"{where}:", f"  {command}"]
    if machine.nodes > 1 and machine.part is not None:
        words = command.partition(" -m isthmus ")[2]
        gpus = f"{machine.gpus_per_node}x{machine.part.name}"
        lines.append(f"  or: isthmus launch slurm {words} --gpus {shlex.quote(gpus)} launch.nodes={machine.nodes}")
    return "\n".join(lines)


def _table(plans: Plans) -> list[str]:
    heads = ["", "layout", "micro batch", "recompute", "GiB/GPU", "s/step", "tokens/s", "MFU", "bound by"]
    rows = [heads]
    for number, candidate in enumerate(plans.best, start=1):
        train, time = candidate.config.train, candidate.time
        layers = "" if train.recompute_layers is None else f" ({train.recompute_layers} layers)"
        offload = " +offload" if candidate.config.optim.offload else ""
        times = (
            ["-"] * 4
            if time is None
            else [
                f"{time.total_s:.3f}",
                f"{time.tokens_per_s:,.0f}",
                f"{time.mfu:.1%}",
                time.binds,
            ]
        )
        rows.append(
            [
                str(number),
                candidate.config.parallel.describe(plans.machine.world_size) + offload,
                str(train.micro_batch_size),
                train.recompute + layers,
                _gib(candidate.total_bytes),
                *times,
            ]
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _network(plans: Plans, candidate: Candidate) -> Iterator[str]:
    """What a rank sends, by kind, and how much of it leaves the node and the rack."""
    assert candidate.time is not None
    yield "a rank of plan 1 sends in a step, GB:"
    for kind, sent in candidate.time.sent.items():
        if not sent.total:
            continue
        racks = "" if plans.machine.rack_nodes is None else f", {sent.to_racks / 1e9:,.2f} to other racks"
        yield f"  {kind} {sent.total / 1e9:,.2f}: {sent.to_nodes / 1e9:,.2f} to other nodes{racks}"


def _long_run(run: LongRun, plans: Plans, candidate: Candidate) -> Iterator[str]:
    assert candidate.time is not None
    machine = plans.machine
    yield "a long run of plan 1, estimated from assumptions; --storage and --mtbf replace two of them:"
    yield f"  start {run.start_s:,.0f} s: {_seconds(run.start)}"
    yield (
        f"  a checkpoint has {run.state_bytes / 1e9:,.0f} GB: steps wait {run.files.pause_s:.1f} s, and it is "
        f"written in {run.write_s:,.0f} s beside them"
    )
    yield f"  a failure every {run.failure_s / 3600:,.1f} hours of {machine.nodes:,} nodes"
    for name, saves, setting in (
        ("checkpoints in files", run.files, "checkpoint.every"),
        ("with copies in memory", run.memory, "checkpoint.memory_every"),
    ):
        minutes = saves.steps * candidate.time.total_s / 60
        yield (
            f"  {name}: {setting}={saves.steps} ({minutes:,.1f} minutes), restart {saves.restart_s:,.0f} s, goodput "
            f"{saves.goodput:.1%}"
        )
        yield f"    restart: {_seconds(saves.restart)}"


def _seconds(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:,.0f}" for name, seconds in parts.items() if seconds >= 0.5)


def _nearest(plans: Plans) -> Iterator[str]:
    closest, machine = plans.closest, plans.machine
    if closest is None:
        yield (
            f"no plan: {plans.config.train.global_batch_size} sequences a step cannot be divided over "
            f"{machine.world_size:,} GPUs in any layout. Change train.global_batch_size or train.micro_batch_size."
        )
        return
    needed, has = _gib(closest.total_bytes), _gib(machine.memory_bytes)
    yield f"does not fit: at least {needed} GiB of a GPU are needed, and it has {has} GiB"
    yield f"closest: {describe(closest, machine)}"
    yield from _columns({name.replace("_", " "): _gib(number) for name, number in memory_parts(closest).items()})
    if plans.suggestions:
        yield "it fits"
        yield from (f"  {text}" for text in plans.suggestions)
    else:
        yield "it does not fit on more GPUs, with shorter sequences or with LoRA either. Use a smaller model."


def explain(plans: Plans, candidate: Candidate) -> Iterator[str]:
    """The formulae of a plan's memory and time, with its numbers."""
    config, precision = candidate.config, plans.precision
    parallel, world = config.parallel, plans.machine.world_size
    plan = plan_of(plans.plan, parallel, world)
    ranks = estimate_ranks(plan, config, precision, gpu_bytes=plans.machine.memory_bytes, compiles=True)
    rank = max(range(len(ranks)), key=lambda rank: ranks[rank].total)
    estimate, saved = ranks[rank], activations(plan, config, precision, on_gpu=True)[rank]
    element = DTYPES[precision].itemsize
    replicas = parallel.shards(world) if parallel.fsdp else parallel.dp(world) * parallel.cp
    kind = "parallel.fsdp" if replicas < parallel.dp(world) * parallel.cp else "dp x cp; experts: over fewer"
    trained = estimate.gradients // 4
    yield f"memory of plan 1, on pipeline rank {rank}:"
    if parallel.fsdp:
        yield (
            f"  weights: 4 bytes x {trained:,} parameters, a share of 1 / {replicas}, and {element} bytes x those of a "
            f"gathered layer, and of a tied embedding = {_gib(estimate.weights)} GiB"
        )
    else:
        yield f"  weights: {element} bytes x {estimate.parameters:,} parameters = {_gib(estimate.weights)} GiB"
    yield f"  gradients: 4 bytes x {trained:,} trained parameters = {_gib(estimate.gradients)} GiB"
    yield (
        f"  optimizer ({config.optim.optimizer}): float32 weights and moments over {replicas} replicas "
        f"({kind}) = {_gib(estimate.optimizer)} GiB"
    )
    yield (
        f"  activations: {float(saved.in_flight):g} micro batches in flight x (layers + {_mib(saved.outside)} MiB "
        f"outside) + {_mib(saved.once)} MiB of a recomputed layer = {_gib(estimate.activations)} GiB, with T = "
        f"{saved.tokens:,} tokens of a micro batch on a rank (cp={parallel.cp}), H = {plan.architecture.hidden_size:,} "
        f"and widths over tp={parallel.tp}"
    )
    for layer, count in saved.kept.items():
        parts = saved.layers[layer]
        yield f"    {count} {layer.description} layers, each keeps {_mib(sum(parts.values()))} MiB of a micro batch:"
        yield from (f"      {name}: {_mib(number)} MiB" for name, number in parts.items())
    if saved.recomputed:
        yield f"    {saved.recomputed} recomputed layers, each keeps its input, T H: {_mib(saved.input_bytes)} MiB"
    yield f"  logits of a chunk with the gradient of the hidden states: {_gib(estimate.logits)} GiB, or"
    yield f"  buffers of a layer's backward pass: {_gib(estimate.temporary)} GiB; the larger one counts"
    yield f"  fragmentation: {FRAGMENTATION:.0%} of activations and buffers = {_gib(candidate.fragmentation)} GiB"
    yield f"  context, kernels and communication buffers: {_gib(CONTEXT_BYTES)} GiB"
    if candidate.time is not None:
        time = candidate.time
        yield f"step of plan 1: {time.micro_batches} micro batches of each data parallel rank"
        yield from (f"  {name}: {seconds:.4f} s; {FORMULAS[name]}" for name, seconds in time.parts.items() if seconds)
        yield (
            f"  MFU: {time.tflops_per_device:.1f} TFLOP/s of a GPU (model FLOPs, causal attention) / peak of "
            f"{time.peak_tflops:g} TFLOP/s = {time.mfu:.1%}"
        )


def _columns(values: dict[str, str]) -> list[str]:
    return ["  " + ", ".join(f"{name} {value}" for name, value in values.items())]


def _gib(number: float) -> str:
    return f"{number / 2**30:,.1f}"


def _mib(number: float) -> str:
    return f"{number / 2**20:,.1f}"
