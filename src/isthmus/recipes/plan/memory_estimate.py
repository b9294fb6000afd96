"""The memory of a rank, estimated before the model is built."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from isthmus.config.schema import ParallelConfig, RunConfig
from isthmus.engine.linear.packed_weights import are_packed
from isthmus.engine.linear.quantized_weight import ELEMENT_BYTES
from isthmus.engine.parallel.sharded_params import BUCKET_BYTES
from isthmus.errors import UsageError
from isthmus.platforms.base import Platform
from isthmus.recipes.model.rank_model import DTYPES
from isthmus.recipes.model.teacher_model import teacher_precision
from isthmus.recipes.plan.activation_estimate import activations, micro_batches, temporary_bytes
from isthmus.recipes.plan.model_plan import ModelPlan, teacher_config
from isthmus.recipes.plan.parameter_counts import PlanCounts, num_parameters
from isthmus.recipes.registry import recipe_of
from isthmus.recipes.rollout.vllm_group import BUCKET_BYTES as SERVER_BUCKET_BYTES
from isthmus.recipes.rollout.vllm_server import started_server_bytes

MARGIN = 1.25
"""The estimate may exceed the memory by this factor, because activations are approximate."""
MOMENT_BYTES = {"adamw": 8.0, "adamw_8bit": 2 + 8 / 256, "muon": 8.0}


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes of the rank that needs most."""

    parameters: int
    """Number of parameters of this rank."""
    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Bytes of all micro batches in flight."""
    temporary: int = 0
    """Bytes of the backward pass of a layer."""
    logits: int = 0
    """Bytes of the loss on the last stage; at another time than ``temporary``, so the larger one counts."""
    quantized: int = 0
    """FP8 copies of weights, which a step of several micro batches keeps in both layouts."""
    offloaded: int = 0
    """Optimizer state, and the copy of a checkpoint, in host memory beside that of a GPU; not in the other fields."""
    copied: int = 0
    """The copies of checkpoints that are written in the background, on a CPU."""
    saved_weights: int = 0
    """Weights in a checkpoint, of a rank that writes them; not in memory besides the other fields."""
    saved_state: int = 0
    """What every rank writes into a checkpoint."""
    teacher: int = 0
    """Weights of the teacher of distillation."""
    reference: int = 0
    """Copies of weights in reinforcement learning: the reference policy, and the policy that generates ahead."""
    states: int = 0
    """States of the sequences in generation, at another time than activations."""
    packed: int = 0
    """Packed copies of weights on a CPU in generation."""
    exchanged: int = 0
    """Buckets of a weight transfer through a process group to servers, on rank 0."""
    absent: int = 0
    """Gradients and optimizer state, which ``rollout.offload`` removes during generation."""

    @property
    def persistent(self) -> int:
        """Bytes kept from step to step, without the offloaded ones."""
        return self.weights + self.gradients + self.optimizer + self.teacher + self.reference + self.copied

    @property
    def training(self) -> int:
        """Bytes of a step."""
        return self.persistent + self.activations + max(self.temporary, self.logits) + self.quantized

    @property
    def generation(self) -> int:
        """Bytes during the generation of answers, and during the transfer of weights before it."""
        return self.persistent - self.absent + self.states + self.packed + self.exchanged

    @property
    def total(self) -> int:
        return max(self.training, self.generation)

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer state": self.optimizer,
            "activations about": self.activations,
        }
        others = {
            "copy for checkpoint.async": self.copied,
            "teacher": self.teacher,
            "copies of the policy": self.reference,
            "(in generation) states of sequences": self.states,
            "(between steps) buckets of weights for vLLM": self.exchanged,
            "(in generation) packed weights": self.packed,
            "temporary": max(self.temporary, self.logits),
            "fp8 weights": self.quantized,
        }
        parts |= {name: number for name, number in others.items() if number}
        listed = ", ".join(f"{name} {gib(number)}" for name, number in parts.items())
        phases = f" ({gib(self.training)} in training, {gib(self.generation)} in generation)" if self.states else ""
        host = f"; and {gib(self.offloaded)} GiB of host memory" if self.offloaded else ""
        return f"{self.parameters:,} parameters a rank, {gib(self.total)} GiB{phases}: {listed}{host}"


def estimate_memory(plan: ModelPlan, config: RunConfig, precision: str, **options: Any) -> MemoryEstimate:
    """Estimate the memory of the rank that needs most, with the options of :func:`estimate_ranks`."""
    return max(estimate_ranks(plan, config, precision, **options), key=lambda estimate: estimate.total)


def estimate_ranks(
    plan: ModelPlan,
    config: RunConfig,
    precision: str,
    *,
    gpu_bytes: int | None = None,
    compiles: bool | None = None,
    counts: PlanCounts | None = None,
) -> list[MemoryEstimate]:
    """Estimate the memory of each pipeline rank.

    Gradients are float32. AdamW keeps two float32 moments per parameter (in host memory with ``optim.offload``), Muon
    one, and both a float32 copy of 16-bit weights; replicas shard them. Frozen parameters have neither. fsdp shards
    float32 weights, gradients and moments over the ranks of a copy, and gathers the largest layer and, for the loss,
    the output layer. A DPO sample is a pair of answers.

    Args:
        plan: model and layout.
        config: settings of the run.
        precision: of its matmuls.
        gpu_bytes: memory of a GPU; None: a CPU.
        compiles: whether the GPU's machine has a compiler; None: if this one has.
        counts: of the plan, for a caller that estimates many layouts.
    """
    counts = counts or PlanCounts(plan, config)
    on_gpu = gpu_bytes is not None
    ranks = activations(plan, config, precision, on_gpu=on_gpu)
    layer, loss = temporary_bytes(plan, config, precision, gpu_bytes, compiles=compiles)
    if plan.parallel.fsdp:
        in_layer, in_loss = _fsdp_buffers(plan, config, precision, counts, on_gpu=on_gpu)
        layer, loss = layer + in_layer, loss + in_loss
    students = []
    for rank, persistent in enumerate(_state(plan, config, precision, counts)):
        moved = {"offloaded": persistent.offloaded + persistent.copied, "copied": 0} if on_gpu else {}
        logits = loss if rank == plan.parallel.pp - 1 else 0
        if config.rollout.offload:
            moved["offloaded"] = moved.get("offloaded", 0) + persistent.optimizer
            moved["absent"] = persistent.gradients + persistent.optimizer
        moved |= _rollout_bytes(plan, config, precision, persistent)
        if rank == 0:
            moved["exchanged"] = _exchange_bytes(config, on_gpu=on_gpu)
        if moved.get("states") and not on_gpu and precision in ("fp32", "bf16"):
            moved["packed"] = _packed_bytes(plan, config, DTYPES[precision], counts, rank)
        students.append(replace(persistent, activations=ranks[rank].total, temporary=layer, logits=logits, **moved))
    if plan.teacher is None or counts.teacher is None:
        return students
    precision = teacher_precision(config, precision)
    teachers = _state(plan.teacher, teacher_config(config), precision, counts.teacher)
    output = 0  # gathered for the loss of the student
    if plan.parallel.fsdp:
        output = DTYPES[precision].itemsize * counts.teacher.all.fsdp_units(plan.parallel).output
    return [
        replace(student, teacher=teacher.weights + output) for student, teacher in zip(students, teachers, strict=True)
    ]


def _rollout_bytes(plan: ModelPlan, config: RunConfig, precision: str, state: MemoryEstimate) -> dict[str, int]:
    """What a pipeline rank of reinforcement learning has besides."""
    if not recipe_of(config).generates_answers:
        return {}
    element, parallel = DTYPES[precision].itemsize, plan.parallel
    rollout, grpo, capacity = config.rollout, config.grpo, config.data.seq_length + 1
    states = 0
    if rollout.engine == "native":
        mixers = [mixer for layer in plan.architecture.layers for mixer in layer.mixers]
        elements = sum(mixer.state_elements(capacity, parallel.tp) for mixer in mixers)
        states = element * _slots(plan, config) * math.ceil(elements / parallel.pp)
    trained = state.gradients // 4  # gradients are float32
    copies = int(grpo.kl_weight > 0) + int(rollout.ahead > 0)
    return {"states": states, "reference": copies * element * trained}


def _exchange_bytes(config: RunConfig, *, on_gpu: bool) -> int:
    """Memory of weight transfers through process groups, if servers may join them; rank 0 is on the first stage."""
    rollout = config.rollout
    if not rollout.url or rollout.transfer == "files" or (rollout.transfer == "auto" and not on_gpu):
        return 0
    return SERVER_BUCKET_BYTES + 2 * BUCKET_BYTES


def _slots(plan: ModelPlan, config: RunConfig) -> int:
    """Answers that a data-parallel rank generates at the same time."""
    answers = config.grpo.updates_per_rollout * config.train.global_batch_size
    return min(config.rollout.batch_size, math.ceil(answers / plan.parallel.dp(plan.world_size)))


def _packed_bytes(plan: ModelPlan, config: RunConfig, dtype: torch.dtype, counts: PlanCounts, rank: int) -> int:
    """Packed copies of the weights of a pipeline rank, without routed experts and quantized weights."""
    multiple = plan.parallel.length_multiple
    if plan.parallel.fsdp or not are_packed(dtype, math.ceil(_slots(plan, config) / multiple) * multiple):
        return 0
    packed = counts.all.of_ranks(plan.parallel)[rank] - counts.quantized.of_ranks(plan.parallel)[rank]
    return dtype.itemsize * (packed.total() - packed["expert"])


def _state(plan: ModelPlan, config: RunConfig, precision: str, counts: PlanCounts) -> list[MemoryEstimate]:
    """What each pipeline rank keeps from step to step."""
    return (_fsdp_state if plan.parallel.fsdp else _sharded_state)(plan, config, precision, counts)


def _host_buffers(config: RunConfig) -> int:
    """Copies of what a rank saves that it keeps in order to write in the background."""
    return (1 + (config.checkpoint.memory_every is not None)) if config.checkpoint.asynchronous else 0


def _fsdp_state(plan: ModelPlan, config: RunConfig, precision: str, counts: PlanCounts) -> list[MemoryEstimate]:
    parallel, element = plan.parallel, DTYPES[precision].itemsize
    shards = parallel.shards(plan.world_size)
    (count,), (trained,), (muon,) = (
        counter.of_ranks(parallel) for counter in (counts.all, counts.trained, counts.by_muon)
    )
    num_weights, total = count.total(), trained.total()
    shard = math.ceil(total / shards)
    weights = 4 * shard + math.ceil(element * (num_weights - total) / shards)
    gathered = counts.all.fsdp_units(parallel)
    weights += (gathered.layer + gathered.shared) * element if shards > 1 or element < 4 else 0
    optimizer = math.ceil(MOMENT_BYTES[config.optim.optimizer] * shard) - 4 * muon.total() // shards
    saved = math.ceil((element * num_weights + 12 * total - 4 * muon.total()) / shards)
    copied = _host_buffers(config) * saved
    return [MemoryEstimate(num_weights, weights, 4 * shard, optimizer, 0, copied=copied, saved_state=saved)]


def _fsdp_buffers(
    plan: ModelPlan, config: RunConfig, precision: str, counts: PlanCounts, *, on_gpu: bool
) -> tuple[int, int]:
    """Temporary bytes of the backward pass of a layer, and of the loss.

    In a layer: the weights of the next one, the float32 gradients of the unit before, which are being reduced, about
    half of its own, and the gradient of a projection that is reduced at the end. In the loss: the output layer. In
    both, the sums of gradients that are reduced after the last micro batch.
    """
    element, arch = DTYPES[precision].itemsize, plan.architecture
    gathered, trained = counts.all.fsdp_units(plan.parallel), counts.trained.fsdp_units(plan.parallel)
    rows = 1 if arch.head.score_head else math.ceil(arch.vocab_size / plan.parallel.tp)
    layer = element * gathered.layer + 4 * max(trained.layer, trained.output) + element * trained.layer // 2
    layer += 0 if gathered.output else element * rows * arch.hidden_size
    # Without streams, the buffer of an all-gather is there until the next one.
    both = 0 if on_gpu else element * (gathered.layer + gathered.shared)
    if plan.parallel.fsdp_reduce == "step" and micro_batches(plan, config) > 1:
        (unsharded,) = counts.trained.of_ranks(plan.parallel)
        both += 4 * unsharded.total()
    return layer + both, element * gathered.output + both


def _sharded_state(plan: ModelPlan, config: RunConfig, precision: str, counts: PlanCounts) -> list[MemoryEstimate]:
    parallel, element = plan.parallel, DTYPES[precision].itemsize
    replicas = parallel.dp(plan.world_size) * parallel.cp
    expert_replicas = max(1, plan.world_size // (parallel.pp * parallel.expert_tp * parallel.ep))
    moments = 0.0 if config.optim.offload else MOMENT_BYTES[config.optim.optimizer]
    state = moments + (4 if element < 4 else 0)

    def sharded(ordinary: float, expert: float) -> int:
        return math.ceil(ordinary / replicas) + math.ceil(expert / expert_replicas)

    estimates = []
    by_kind = (counter.of_ranks(parallel) for counter in (counts.all, counts.trained, counts.adapters, counts.by_muon))
    quantized = counts.quantized.of_ranks(parallel)
    for (counted, trained, adapters, muon), frozen in zip(zip(*by_kind, strict=True), quantized, strict=True):
        counted, trained = counted + adapters, trained + adapters
        float32, expert = trained["float32"], trained["expert"]
        ordinary = trained.total() - float32 - expert
        optimizer = sharded(state * ordinary + moments * float32, state * expert)
        optimizer -= 4 * ((muon.total() - muon["expert"]) // replicas + muon["expert"] // expert_replicas)
        weights = element * (counted.total() - counted["float32"]) + 4 * counted["float32"]
        if config.lora.quantize is not None:
            weights -= math.floor((element - ELEMENT_BYTES[config.lora.quantize]) * frozen.total())
        saved_weights = element * (trained if plan.adapters else counted).total()
        saved_state = sharded(12 * (ordinary + float32), 12 * expert) - 4 * muon.total() // replicas
        # In both layouts; with a scale of one byte for 32 elements in MXFP8.
        fp8_element = 2 + 2 / 32 if config.train.fp8_scaling == "mxfp8" else 2
        several = precision == "fp8" and micro_batches(plan, config) > 1
        expert_weights = counted["expert"] if config.train.fp8_experts else 0
        estimates.append(
            MemoryEstimate(
                counted.total(),
                weights,
                4 * trained.total(),
                optimizer,
                0,
                copied=_host_buffers(config) * (saved_weights + saved_state),
                saved_weights=saved_weights,
                saved_state=saved_state,
                offloaded=sharded(8 * (ordinary + float32), 8 * expert) if config.optim.offload else 0,
                quantized=math.ceil(fp8_element * counted["linear"] + 2 * expert_weights) if several else 0,
            )
        )
    return estimates


def check_memory(plan: ModelPlan, config: RunConfig, platform: Platform, precision: str, *, ranks_here: int) -> str:
    """Check the estimate against the memory of a rank and the host; returns it for the log.

    Raises UsageError if the persistent state exceeds the memory, or the whole estimate ``MARGIN`` times the memory.
    """
    memory = platform.memory_for_rank_bytes(ranks_here)
    on_gpu = platform.device_type == "cuda"
    estimate = estimate_memory(plan, config, precision, gpu_bytes=memory if on_gpu else None)
    owner = "a GPU" if on_gpu else "a rank's share of the free memory of this machine"
    server = 0 if on_gpu else _server_bytes(plan, config, precision)
    if server:
        memory = max(0, memory - server // ranks_here)
        owner += f" without {gib(server)} GiB for the vLLM server"
    if estimate.offloaded > (free := platform.free_host_bytes() // ranks_here):
        raise UsageError(
            f"{_users_of_host_memory(config)} {gib(estimate.offloaded)} GiB of each rank into host memory, and a "
            f"rank's share of the free host memory is {gib(free)} GiB. Start more ranks on more machines, or leave it "
            "out."
        )
    if estimate.persistent <= memory and estimate.total <= MARGIN * memory:
        return f"memory, estimated: {estimate}; {owner} is {gib(memory)} GiB"
    if estimate.persistent > memory:
        hints = _smaller_state(plan.parallel, platform, precision, offloaded=config.optim.offload)
    else:
        hints = _smaller_activations(config)
        if estimate.generation > estimate.training:
            hints = ["lower rollout.batch_size or data.seq_length", "raise parallel.tp or parallel.pp over more ranks"]
            if on_gpu and not config.rollout.offload:
                hints.insert(0, "set rollout.offload=true")
    hint = "; or ".join(hints)
    raise UsageError(
        f"the model ({plan.architecture.family}) has {estimate}. {owner[0].upper()}{owner[1:]} is {gib(memory)} GiB. "
        f"{hint[0].upper()}{hint[1:]}.{' `isthmus plan` lists the layouts that fit.' if on_gpu else ''}"
    )


def _server_bytes(plan: ModelPlan, config: RunConfig, precision: str) -> int:
    """The memory of the vLLM server that the run starts beside it, if it starts one."""
    if not recipe_of(config).generates_answers:
        return 0
    return started_server_bytes(config, DTYPES[precision].itemsize * num_parameters(plan.family, plan.architecture))


def _users_of_host_memory(config: RunConfig) -> str:
    users = {
        "optim.offload": config.optim.offload,
        "rollout.offload": config.rollout.offload,
        "checkpoint.async": config.checkpoint.asynchronous,
    }
    names = [f"{name}=true" for name, is_set in users.items() if is_set]
    return " and ".join(names) + (" put" if len(names) > 1 else " puts")


def _smaller_state(parallel: ParallelConfig, platform: Platform, precision: str, *, offloaded: bool) -> list[str]:
    hints = []
    if not parallel.fsdp and parallel.pp == 1 and parallel.ep == 1 and precision in ("fp32", "bf16"):
        hints.append("set parallel.fsdp=true over several ranks")
    if platform.device_type == "cuda" and not parallel.fsdp and not offloaded:
        hints.append("set optim.offload=true")
    more = "start more ranks to shard it over" if parallel.fsdp else "raise parallel.tp or parallel.pp over more ranks"
    more = more if parallel.fsdp in (False, True) else "raise parallel.fsdp"
    return [*hints, more, "use a smaller model"]


def _smaller_activations(config: RunConfig) -> list[str]:
    hints = []
    if config.parallel.fsdp_reduce == "step":
        hints.append("leave parallel.fsdp_reduce out")
    if config.train.micro_batch_size > 1:
        hints.append("lower train.micro_batch_size")
    if config.train.recompute != "full":
        hints.append("set train.recompute=full")
    return [*hints, "raise parallel.cp or parallel.tp", "lower data.seq_length"]


def gib(number: float) -> str:
    return f"{number / 2**30:,.1f}" if number >= 2**30 / 10 else f"{number / 2**30:.3f}"
