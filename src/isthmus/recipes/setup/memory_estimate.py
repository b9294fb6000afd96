"""The memory of a rank, estimated before the model is built."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

from isthmus.config.schema import ParallelConfig, RunConfig
from isthmus.engine.layers.quantized_weight import ELEMENT_BYTES
from isthmus.engine.parallel.pipeline_layout import layers_per_stage
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family, Placement
from isthmus.families.matched_tensors import hidden_matrices
from isthmus.families.rules.mtp import is_mtp_copy
from isthmus.families.rules.shard import Layout, local_shape
from isthmus.platforms.base import Platform
from isthmus.platforms.free_memory import free_bytes
from isthmus.recipes.setup.activation_estimate import activation_bytes, micro_batches, temporary_bytes
from isthmus.recipes.setup.model_plan import ModelPlan, teacher_config
from isthmus.recipes.setup.rank_model import DTYPES
from isthmus.recipes.setup.teacher_model import teacher_precision

MARGIN = 1.25
"""The estimate may exceed the memory by this factor, because activations are approximate."""
_MOMENT_BYTES = {"adamw": 8.0, "adamw_8bit": 2 + 8 / 256, "muon": 8.0}
_LAYER_NUMBER = re.compile(r"decoder\.layers\.(\d+)\.")
_LINEAR_WEIGHT = re.compile(r"(linear_\w+|eh_proj)\.weight$")
_FP8_WEIGHT = re.compile(r"linear_(?!q_down|kv_down)\w+\.weight$")


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of the rank that needs most."""

    parameters: int
    """Number of parameters of this rank."""
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Of all micro batches in flight."""
    temporary: int = 0
    """Of the loss or of the backward pass of a layer, on a GPU."""
    quantized: int = 0
    """FP8 copies of weights, which a step of several micro batches keeps in both layouts."""
    offloaded: int = 0
    """Optimizer state, and the copy of a checkpoint, in host memory beside that of a GPU; not in the other fields."""
    copied: int = 0
    """The copy of a checkpoint that is written in the background, on a CPU."""
    teacher: int = 0
    """Weights of the teacher of distillation."""

    @property
    def persistent(self) -> int:
        """Bytes kept from step to step, without the offloaded ones."""
        return self.weights + self.gradients + self.optimizer + self.teacher + self.copied

    @property
    def total(self) -> int:
        return self.persistent + self.activations + self.temporary + self.quantized

    def __str__(self) -> str:
        parts = {
            "weights": self.weights, "gradients": self.gradients, "optimizer state": self.optimizer,
            "activations about": self.activations,
        }  # fmt: skip
        if self.copied:
            parts["copy for checkpoint.async"] = self.copied
        if self.teacher:
            parts["teacher"] = self.teacher
        if self.temporary:
            parts["temporary"] = self.temporary
        if self.quantized:
            parts["fp8 weights"] = self.quantized
        listed = ", ".join(f"{name} {_gib(number)}" for name, number in parts.items())
        host = f"; and {_gib(self.offloaded)} GiB of host memory" if self.offloaded else ""
        return f"{self.parameters:,} parameters a rank, {_gib(self.total)} GiB: {listed}{host}"


def estimate_memory(
    plan: ModelPlan, config: RunConfig, precision: str, *, gpu_bytes: int | None = None
) -> MemoryEstimate:
    """Estimate the memory of the rank that needs most; see :func:`estimate_ranks`."""
    estimates = estimate_ranks(plan, config, precision, gpu_bytes=gpu_bytes)
    if plan.teacher is not None:
        own = estimate_ranks(plan.teacher, teacher_config(config), teacher_precision(config, precision))
        estimates = [replace(student, teacher=teacher.weights) for student, teacher in zip(estimates, own, strict=True)]
    return max(estimates, key=lambda estimate: estimate.total)


def estimate_ranks(
    plan: ModelPlan, config: RunConfig, precision: str, *, gpu_bytes: int | None = None
) -> list[MemoryEstimate]:
    """Estimate the memory of each pipeline rank.

    Gradients are float32. AdamW keeps two float32 moments per parameter (in host memory with ``optim.offload``), Muon
    one, and both a float32 copy of 16-bit weights; replicas shard them. Frozen parameters have neither. fsdp shards
    float32 weights, gradients and moments, and gathers the largest layer, the embedding and the output layer. A DPO
    sample is a pair of answers. ``gpu_bytes`` adds the temporary memory of a GPU of this size.
    """
    parallel = plan.parallel
    counts, gathered = _count_parameters(plan.family, plan.architecture, parallel)
    all_trained, _ = _count_parameters(plan.family, plan.architecture, parallel, plan.frozen)
    by_muon = _count_muon(plan, config)
    for every, trained, adapters in zip(counts, all_trained, _count_adapters(plan), strict=True):
        every += adapters
        trained += adapters
    element = DTYPES[precision].itemsize
    replicas = parallel.dp(plan.world_size) * parallel.cp
    expert_replicas = max(1, plan.world_size // (parallel.pp * parallel.expert_tp * parallel.ep))
    moments = 0.0 if config.optim.offload else _MOMENT_BYTES[config.optim.optimizer]
    state = moments + (4 if element < 4 else 0)
    saved = _saved_by_quantization(plan, config, element)
    estimates: list[MemoryEstimate] = []
    for rank, (count, trained, muon) in enumerate(zip(counts, all_trained, by_muon, strict=True)):
        total, float32, expert = trained.total(), trained["float32"], trained["expert"]
        ordinary = total - float32 - expert
        activations = activation_bytes(plan, config, precision, rank, on_gpu=gpu_bytes is not None)
        temporary = temporary_bytes(plan, config, precision, rank, gpu_bytes) if gpu_bytes else 0
        if parallel.fsdp:
            shard = math.ceil(total / replicas)
            weights = 4 * shard + math.ceil(element * (count.total() - total) / replicas)
            weights += gathered * element if replicas > 1 or element < 4 else 0
            optimizer = math.ceil(moments * shard) - 4 * muon.total() // replicas
            copied = math.ceil((element * count.total() + 12 * total - 4 * muon.total()) / replicas)
            host = _on_host(copied if config.checkpoint.asynchronous else 0, on_gpu=gpu_bytes is not None)
            estimates.append(
                MemoryEstimate(count.total(), weights, 4 * shard, optimizer, activations, temporary, **host)
            )
            continue
        optimizer = math.ceil((state * ordinary + moments * float32) / replicas)
        optimizer += math.ceil(state * expert / expert_replicas)
        optimizer -= 4 * ((muon.total() - muon["expert"]) // replicas + muon["expert"] // expert_replicas)
        weights = element * (count.total() - count["float32"]) + 4 * count["float32"]
        weights -= saved[rank]
        offloaded = 0
        if config.optim.offload:
            offloaded = math.ceil(8 * (ordinary + float32) / replicas)
            offloaded += math.ceil(8 * expert / expert_replicas)
        copied = 0
        if config.checkpoint.asynchronous:  # of a rank that also writes weights
            copied = element * (total if plan.adapters else count.total()) + math.ceil(12 * (total - expert) / replicas)
            copied += math.ceil(12 * expert / expert_replicas) - 4 * muon.total() // replicas
        host = _on_host(copied, offloaded, on_gpu=gpu_bytes is not None)
        quantized = 2 * count["linear"] if precision == "fp8" and micro_batches(plan, config) > 1 else 0
        estimates.append(
            MemoryEstimate(count.total(), weights, 4 * total, optimizer, activations, temporary, quantized, **host)
        )
    return estimates


def _on_host(copied: int, offloaded: int = 0, *, on_gpu: bool) -> dict[str, int]:
    return {"offloaded": offloaded + copied} if on_gpu else {"offloaded": offloaded, "copied": copied}


def _count_adapters(plan: ModelPlan) -> list[Counter[str]]:
    """Parameters of the adapters of each pipeline rank, by kind."""
    arch, parallel = plan.architecture, plan.parallel
    counts = [Counter[str]() for _ in range(parallel.pp)]
    if plan.adapters is None:
        return counts
    layout, rank_of = _first_rank(arch, parallel), _pipeline_ranks(arch, parallel)
    placements = plan.family.placements(arch)
    for name, adapters in plan.adapters.of_weights.items():
        if not _is_own_parameter(name, placements[name], arch, parallel):
            continue
        rule = placements[name].rule
        (rows, columns), share = local_shape(rule, arch, layout), rule.canonical_shape(arch)[0]
        kind = "expert" if rule.is_expert else "ordinary"
        for adapter in adapters:
            own_rows = adapter.linear.out * rows // share
            numel = adapter.rank * (columns + own_rows) + own_rows * plan.adapters.dora
            counts[_pipeline_rank(name, rank_of, parallel.pp)][kind] += numel
    return counts


def _count_muon(plan: ModelPlan, config: RunConfig) -> list[Counter[str]]:
    """Parameters of each pipeline rank that Muon updates, by kind."""
    if config.optim.optimizer != "muon":
        return [Counter()] * plan.parallel.pp
    others = plan.family.placements(plan.architecture).keys() - hidden_matrices(plan.family, plan.architecture).keys()
    return _count_parameters(plan.family, plan.architecture, plan.parallel, plan.frozen | others)[0]


def _saved_by_quantization(plan: ModelPlan, config: RunConfig, element: int) -> list[int]:
    """Bytes that each pipeline rank saves, of weights with ``element`` bytes."""
    sizes = plan.family, plan.architecture, plan.parallel
    if config.lora.quantize is None:
        return [0] * plan.parallel.pp
    linears = {name for name in plan.frozen if _LINEAR_WEIGHT.search(name)}
    every, others = _count_parameters(*sizes)[0], _count_parameters(*sizes, linears)[0]
    bytes_saved = element - ELEMENT_BYTES[config.lora.quantize]
    return [math.floor(bytes_saved * (a.total() - b.total())) for a, b in zip(every, others, strict=True)]


def check_memory(plan: ModelPlan, config: RunConfig, platform: Platform, precision: str, *, ranks_here: int) -> str:
    """Check the estimate against the memory of a rank and the host; returns it for the log.

    Raises UsageError if the persistent state exceeds the memory, or the whole estimate ``MARGIN`` times the memory.
    """
    memory = platform.memory_for_rank_bytes(ranks_here)
    on_gpu = platform.device_type == "cuda"
    estimate = estimate_memory(plan, config, precision, gpu_bytes=memory if on_gpu else None)
    owner = "a GPU" if on_gpu else "a rank's share of the free memory of this machine"
    if estimate.offloaded > (free := free_bytes() // ranks_here):
        raise UsageError(
            f"{_users_of_host_memory(config)} {_gib(estimate.offloaded)} GiB of each rank into host memory, and a "
            f"rank's share of the free host memory is {_gib(free)} GiB. Start more ranks on more machines, or leave it "
            "out."
        )
    if estimate.persistent <= memory and estimate.total <= MARGIN * memory:
        return f"memory, estimated: {estimate}; {owner} is {_gib(memory)} GiB"
    if estimate.persistent > memory:
        hints = _smaller_state(plan.parallel, platform, precision, offloaded=config.optim.offload)
    else:
        hints = _smaller_activations(config)
    hint = "; or ".join(hints)
    raise UsageError(
        f"the model ({plan.architecture.family}) has {estimate}. {owner[0].upper()}{owner[1:]} is {_gib(memory)} GiB. "
        f"{hint[0].upper()}{hint[1:]}."
    )


def _users_of_host_memory(config: RunConfig) -> str:
    names = ["optim.offload=true"] * config.optim.offload + ["checkpoint.async=true"] * config.checkpoint.asynchronous
    return " and ".join(names) + (" put" if len(names) > 1 else " puts")


def _smaller_state(parallel: ParallelConfig, platform: Platform, precision: str, *, offloaded: bool) -> list[str]:
    hints = []
    if not parallel.fsdp and parallel.pp == 1 and parallel.ep == 1 and precision in ("fp32", "bf16"):
        hints.append("set parallel.fsdp=true over several ranks")
    if platform.device_type == "cuda" and not parallel.fsdp and not offloaded:
        hints.append("set optim.offload=true")
    more = "start more ranks to shard it over" if parallel.fsdp else "raise parallel.tp or parallel.pp over more ranks"
    return [*hints, more, "use a smaller model"]


def _smaller_activations(config: RunConfig) -> list[str]:
    hints = []
    if config.train.micro_batch_size > 1:
        hints.append("lower train.micro_batch_size")
    if config.train.recompute != "full":
        hints.append("set train.recompute=full")
    return [*hints, "raise parallel.cp or parallel.tp", "lower data.seq_length"]


def num_parameters(family: Family, arch: Architecture, frozen: Collection[str] = ()) -> int:
    """Of the whole model without ``frozen`` tensors; a tied tensor counts once."""
    return _count_parameters(family, arch, ParallelConfig(), frozen)[0][0].total()


def _count_parameters(
    family: Family, arch: Architecture, parallel: ParallelConfig, frozen: Collection[str] = ()
) -> tuple[list[Counter[str]], int]:
    """Parameters of each pipeline rank by kind, and the number that fsdp gathers at once: a layer and the rest."""
    layout, rank_of = _first_rank(arch, parallel), _pipeline_ranks(arch, parallel)
    counts, by_layer = [Counter[str]() for _ in range(parallel.pp)], Counter[str]()
    numel_of_rule: dict[int, int] = {}
    for name, placement in family.placements(arch).items():
        if name in frozen or not _is_own_parameter(name, placement, arch, parallel):
            continue
        rule = placement.rule
        if id(rule) not in numel_of_rule:
            numel_of_rule[id(rule)] = math.prod(local_shape(rule, arch, layout))
        numel, count = numel_of_rule[id(rule)], counts[_pipeline_rank(name, rank_of, parallel.pp)]
        is_float32 = name.endswith("router.weight") and arch.moe is not None and arch.moe.router_float32
        kind = "linear" if _FP8_WEIGHT.search(name) else "ordinary"
        count["expert" if rule.is_expert else "float32" if is_float32 else kind] += numel
        layer = _LAYER_NUMBER.match(name)
        by_layer[layer[1] if layer else ""] += numel
    outside = by_layer.pop("", 0)
    return counts, outside + max(by_layer.values(), default=0)


def _first_rank(arch: Architecture, parallel: ParallelConfig) -> Layout:
    padded = math.ceil(arch.vocab_size / parallel.tp) * parallel.tp
    return Layout(tp_size=parallel.tp, etp_size=parallel.expert_tp, padded_vocab_size=padded)


def _pipeline_ranks(arch: Architecture, parallel: ParallelConfig) -> list[int]:
    """The pipeline rank of each layer."""
    stages = enumerate(layers_per_stage(arch.num_layers, parallel.pp, parallel.vpp))
    return [stage % parallel.pp for stage, layers in stages for _ in range(layers)]


def _is_own_parameter(name: str, placement: Placement, arch: Architecture, parallel: ParallelConfig) -> bool:
    """Whether a rank has this parameter: it may be tied, a buffer, or an expert of another rank."""
    if (placement.rule.alias and parallel.pp == 1) or name.endswith("expert_bias") or is_mtp_copy(name):
        return False
    return not (placement.rule.is_expert and arch.moe is not None
                and placement.expert >= arch.moe.num_experts // parallel.ep)  # fmt: skip


def _pipeline_rank(name: str, rank_of: list[int], pp: int) -> int:
    layer = _LAYER_NUMBER.match(name)
    if layer is not None:
        return rank_of[int(layer[1])]
    return 0 if name.startswith("embedding.") else pp - 1


def _gib(number: float) -> str:
    return f"{number / 2**30:,.1f}" if number >= 2**30 / 10 else f"{number / 2**30:.3f}"
