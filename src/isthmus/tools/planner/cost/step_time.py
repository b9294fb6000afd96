"""The time of an optimizer step in a layout, and what it consists of."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from isthmus.config.schema import ParallelConfig
from isthmus.engine.parallel.pipeline_layout import layers_per_stage
from isthmus.families.architecture import Architecture
from isthmus.tools.planner.cost.cluster import Cluster, Ring, Sent
from isthmus.tools.planner.cost.kernels import Kernels
from isthmus.tools.planner.cost.layer_time import KINDS, LayerModel, Times
from isthmus.tools.planner.cost.workload import Generation, Workload
from isthmus.train.flops import flops_per_batch

CONTENTION = 0.2
"""Share of overlapped communication by which it slows the computation: it takes compute units and memory bandwidth."""
HOST_SHARE = 0.8
"""Share of the bandwidth to host memory that copies reach."""
BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK = 40_000_000, 1_000_000
"""Megatron-Core's gradient buckets; the last one is reduced after the backward pass."""
BINDING_SHARE = 0.1

FORMULAS = {
    "gemm": "2 m n k FLOPs a matmul, 3 a weight with its gradients, at the speed of the part's fastest GEMM times "
    "a share for this size",
    "attention": "4 N D L^2 / 2 FLOPs a sample forward, 2.5 times as many backward",
    "memory": "bytes that norms, residual sums, activations, rotary embedding and sorting move, over the memory "
    "bandwidth",
    "loss": "6 H V FLOPs a token whose logits are computed, and three passes over the logits",
    "recompute": "the repeated part of the forward pass",
    "tp": "(tp - 1) / tp of the hidden states over the links, 4 times a layer forward; backward, what matmuls do not "
    "hide",
    "cp": "(cp - 1) / cp of keys and values, forward and backward",
    "ep": "routed rows to their experts and back, forward and backward, the share to other nodes over the network",
    "pp": "hidden states of each micro batch between stages",
    "bubble": "(pp - 1) / vpp micro batches: the pipeline fills and drains",
    "dp": "gradients (float32) and weights over the replicas, minus what the backward and forward pass hide",
    "host": "what starting the kernels of the layers takes longer than computing them",
    "optimizer": "bytes per updated parameter over the memory bandwidth; with optim.offload 16 over the host link",
    "teacher": "forward pass of the teacher; for kto, of the mismatched answers; for grpo, of the reference policy",
    "generation": "for each new token of grpo, a pass through all stages that reads weights and states of sequences at "
    "the memory bandwidth",
    "offload": "with rollout.offload, the optimizer state to the host and back over the host link, for each rollout",
}
"""What each part of a step is, for ``isthmus plan --explain``."""
COMPUTE = ("gemm", "attention", "loss", "recompute", "teacher")
GROUPS: dict[str, tuple[str, ...]] = {
    "matmul": ("gemm",),
    "attention": ("attention",),
    "loss": ("loss",),
    "elementwise": ("memory",),
    "recompute": ("recompute",),
    "collectives": ("tp", "cp", "ep", "pp", "dp"),
    "bubble": ("bubble",),
    "host": ("host",),
    "optimizer": ("optimizer",),
    "other": ("teacher", "generation", "offload"),
}
"""The parts of a step by what limits them, for the shares of its time."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of an optimizer step on the slowest rank."""

    parts: dict[str, float]
    """Seconds that nothing overlaps, by the keys of :data:`FORMULAS`."""
    total_s: float
    work: Workload
    world_size: int
    peak_tflops: float
    micro_batches: int
    sent: dict[str, Sent]
    """Bytes that a rank sends in a step, by ``tp``, ``cp``, ``ep``, ``pp`` and ``dp``."""
    parameters: float
    """Trained parameters of the slowest rank, before data-parallel ranks divide their state."""

    @property
    def tokens_per_s(self) -> float:
        """Over all devices."""
        return self.work.tokens / self.total_s

    @property
    def tokens_per_s_per_device(self) -> float:
        return self.tokens_per_s / self.world_size

    @property
    def tflops_per_device(self) -> float:
        """TFLOP/s of the model with causal attention, as runs report them."""
        work = self.work
        squares = work.tokens * int(work.seq_length / work.samples_per_sequence)
        flops = flops_per_batch(work.architecture, work.tokens, squares, int(work.loss_share * work.tokens))
        return flops / self.total_s / self.world_size / 1e12

    @property
    def mfu(self) -> float:
        """0..1, of the peak of the precision, as runs report it."""
        return self.tflops_per_device / self.peak_tflops

    @property
    def shares(self) -> dict[str, float]:
        """0..1 of the time, by the keys of :data:`GROUPS`."""
        return {group: sum(self.parts[part] for part in parts) / self.total_s for group, parts in GROUPS.items()}

    @property
    def binds(self) -> str:
        """The largest part beside computation if it is a tenth of the step or more, else ``compute``."""
        others = {name: seconds for name, seconds in self.parts.items() if name not in COMPUTE}
        name = max(others, key=lambda name: others[name])
        return name if others[name] >= BINDING_SHARE * self.total_s else "compute"


@dataclass(slots=True)
class _Rank:
    """A pipeline rank: times of one micro batch, and parameters."""

    forward: Times
    backward: Times
    recomputed: Times
    parameters: float = 0.0
    expert_parameters: float = 0.0
    adapters: float = 0.0
    layers: int = 0
    host_s: float = 0.0

    def seconds(self) -> float:
        return self.forward.total() + self.backward.total() + self.recomputed.total()


def step_time(work: Workload, parallel: ParallelConfig, cluster: Cluster) -> StepTime:
    """Estimate the time of an optimizer step of ``work`` on all ranks of ``cluster``.

    Computation, memory-bound kernels and communication of the slowest pipeline rank, plus the pipeline bubble, the
    exchange between replicas and the optimizer. The layout must be valid for the model and the number of ranks.

    Raises:
        UsageError: the part cannot compute in this precision.
    """
    kernels = Kernels(cluster.part, work.precision)
    world, pp, vpp = cluster.world_size, parallel.pp, parallel.vpp
    replicas = max(1, parallel.dp(world))
    number = max(1, work.global_batch_size // (work.micro_batch_size * replicas))
    arch, model = work.architecture, LayerModel(work, parallel, cluster, kernels)
    ranks = _ranks(model)
    slowest = max(ranks, key=_Rank.seconds)
    parts = dict.fromkeys(FORMULAS, 0.0)
    for name in KINDS:
        parts[name] = number * (getattr(slowest.forward, name) + getattr(slowest.backward, name))
    parts["recompute"] = number * slowest.recomputed.total()
    passes = Times()
    for part in (slowest.forward, slowest.backward, slowest.recomputed):
        passes.add(part, number)
    sent = passes.sent
    parts["host"] = number * max(0.0, slowest.host_s - slowest.seconds())
    if pp > 1:
        ring, hidden_states = Ring(cluster, pp, world // pp), model.outside * arch.hidden_size * kernels.element
        send = ring.send(hidden_states)
        sent["pp"] = Sent()
        sent["pp"].add(ring.neighbour_sends(hidden_states), 2 * number * vpp)
        hidden = slowest.forward.total() / vpp if vpp > 1 else 0.0
        parts["pp"] = 2 * send * (pp - 1) + 2 * number * vpp * max(0.0, send - hidden)
        parts["bubble"] = (sum(rank.seconds() for rank in ranks) - slowest.seconds()) / vpp
    if parallel.fsdp:
        once = parallel.fsdp_reduce == "step"
        for times, reduces in ((number - 1, not once), (1, True)):
            copies, exchange = _fsdp(slowest, model, cluster, reduces=reduces)
            parts["memory"] += times * copies
            parts["dp"] += times * exchange
        parts["dp"] += _copies(slowest, model, cluster)
    else:
        parts["dp"] = _replicas(slowest, model, cluster)
    parts["optimizer"] = _optimizer(slowest, model, cluster)
    if work.teacher is not None:
        parts["teacher"] = number * _teacher(work, parallel, cluster, kernels)
    if work.generation is not None:
        parts["generation"] = _generation(work.generation, ranks, model, replicas)
        parts["offload"] = _state_transfer(work.generation, slowest, model, cluster)
    if (exchanged := _replicas_send(slowest, model, cluster, number)).total:
        sent["dp"] = exchanged
    peak, trained = cluster.part.peak_tflops[work.precision], sum(_trained(slowest, model))
    return StepTime(parts, sum(parts.values()), work, world, peak, number, sent, trained)


@functools.lru_cache(maxsize=512)
def _layers_of_ranks(arch: Architecture, pp: int, vpp: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Layers of each pipeline rank: (the first layer of a kind, number of layers of that kind)."""
    sizes = layers_per_stage(arch.num_layers, pp, vpp)
    ends = list(accumulate(sizes))
    layers = []
    for rank in range(pp):
        stages = range(rank, len(sizes), pp)
        counts = Counter(n for stage in stages for n in arch.first_equals[ends[stage] - sizes[stage] : ends[stage]])
        layers.append(tuple(counts.items()))
    return tuple(layers)


def _ranks(model: LayerModel) -> list[_Rank]:
    arch, parallel = model.arch, model.parallel
    counted = _layers_of_ranks(arch, parallel.pp, parallel.vpp)
    ranks_by_layers: dict[object, _Rank] = {}
    ranks = []
    for number, layers in enumerate(counted):
        if layers not in ranks_by_layers:
            ranks_by_layers[layers] = _rank(model, layers)
        rank = ranks_by_layers[layers]
        if number in (0, parallel.pp - 1):
            rank = _with_ends(model, rank, first=number == 0, last=number == parallel.pp - 1)
        ranks.append(rank)
    return ranks


def _rank(model: LayerModel, layers: tuple[tuple[int, int], ...]) -> _Rank:
    work, total = model.work, _Rank(Times(), Times(), Times())
    total.layers = sum(times for _, times in layers)
    repeated = 0.0
    if work.recompute == "full":
        limit = total.layers if work.recompute_layers is None else work.recompute_layers * model.parallel.vpp
        repeated = min(1.0, limit / max(1, total.layers))
    for number, times in layers:
        layer = model.layer(number)
        total.forward.add(layer.forward, times)
        total.backward.add(layer.backward, times)
        total.recomputed.add(layer.recomputed, times)
        total.recomputed.add(layer.forward, times * repeated)
        total.host_s += times * layer.host_s * (1 + repeated / 3)
        total.parameters += times * layer.parameters
        total.expert_parameters += times * layer.expert_parameters
        total.adapters += times * layer.adapters
    return total


def _with_ends(model: LayerModel, rank: _Rank, *, first: bool, last: bool) -> _Rank:
    """Adds embedding (read and written), last norm, output projection and loss (three passes over the logits)."""
    arch, work, kernels = model.arch, model.work, model.kernels
    total = replace(rank, forward=rank.forward.copy(), backward=rank.backward.copy())
    width = model.outside * arch.hidden_size * kernels.element
    vocabulary = arch.vocab_size / model.tp
    if first:
        total.forward.memory += kernels.memory(2 * width)
        total.backward.memory += kernels.memory(3 * width)
        total.parameters += vocabulary * arch.hidden_size
    if last:
        rows = model.tokens * work.loss_share
        for _ in range(1 + arch.pattern.mtp_layers):
            columns = 1.0 if arch.head.score_head else vocabulary
            forward = kernels.gemm(rows, columns, arch.hidden_size, fp8=False)
            update = kernels.gemm(columns, arch.hidden_size, rows, fp8=False, sum_bytes=4) if model.trained else 0.0
            total.forward.loss += forward + kernels.memory(3 * rows * columns * kernels.element, 3)
            total.backward.loss += kernels.gemm(rows, arch.hidden_size, columns, fp8=False) + update
            total.forward.memory += kernels.memory(2 * width)
            total.backward.memory += kernels.memory(3 * width)
            gathered = model.tokens * arch.hidden_size * kernels.element
            for times in (total.forward, total.backward):
                times.tp += model.tp_ring.gather(gathered)
                times.send("tp", model.tp_ring.gather_sends(gathered))
        if not (first and arch.head.tie_embeddings):
            total.parameters += (1 if arch.head.score_head else vocabulary) * arch.hidden_size
        for number in range(arch.pattern.mtp_layers):
            layer = model.layer(arch.num_layers + number)
            total.forward.add(layer.forward)
            total.backward.add(layer.backward)
            projection = kernels.gemm(model.tokens, arch.hidden_size / model.tp, 2 * arch.hidden_size)
            total.forward.gemm += projection
            total.backward.gemm += 2 * projection
            total.parameters += layer.parameters + 2 * arch.hidden_size**2 / model.tp
            total.expert_parameters += layer.expert_parameters
    return total


def _exposed(exchange: float, window: float, tail: float) -> float:
    """What a window of computation does not hide of an exchange, at least its ``tail``; the rest slows it down."""
    exposed = max(tail, exchange - window)
    return exposed + CONTENTION * max(0.0, exchange - exposed)


def _trained(rank: _Rank, model: LayerModel) -> tuple[float, float]:
    """Trained parameters of the rank, and of its experts."""
    if model.trained:
        return rank.parameters, rank.expert_parameters
    return rank.adapters, 0.0


def _rings(model: LayerModel, cluster: Cluster) -> tuple[Ring, Ring]:
    """Ranks that shard the state of the ordinary parameters, and of those of experts: all replicas, but with HSDP."""
    parallel, world = model.parallel, cluster.world_size
    experts = parallel.expert_tp * parallel.ep
    replicas = parallel.shards(world) if parallel.fsdp else world // (parallel.tp * parallel.pp)
    return (
        Ring(cluster, max(1, replicas), parallel.tp),
        Ring(cluster, max(1, world // (parallel.pp * experts)), experts),
    )


def _replicas(rank: _Rank, model: LayerModel, cluster: Cluster) -> float:
    """Data parallelism with a sharded optimizer: gradients are reduce-scattered in the backward pass of the last micro
    batch, updated weights gathered in the first forward pass.
    """
    ordinary, experts = _trained(rank, model)
    ring, expert_ring = _rings(model, cluster)
    reduced = ring.gather(4 * ordinary) + expert_ring.gather(4 * experts)
    element = model.kernels.element
    gathered = ring.gather(element * ordinary) + expert_ring.gather(element * experts)
    if not reduced:
        return 0.0
    parallel = model.parallel
    on = parallel.overlap_grad_reduce is not False
    bucket = max(BUCKET_ELEMENTS, BUCKET_ELEMENTS_PER_RANK * ring.size) / max(1.0, ordinary + experts)
    backward = rank.backward.total() + rank.recomputed.total() if on else 0.0
    forward = rank.forward.total() if on and parallel.overlap_param_gather is not False else 0.0
    seconds = _exposed(reduced, backward, min(1.0, bucket) * reduced)
    return seconds + _exposed(gathered, forward, min(1.0, bucket) * gathered)


def _replicas_send(rank: _Rank, model: LayerModel, cluster: Cluster, micro_batches: int) -> Sent:
    """What :func:`_replicas`, :func:`_fsdp` and :func:`_copies` exchange in a step of a rank."""
    parallel, element = model.parallel, model.kernels.element
    ordinary, experts = _trained(rank, model)
    ring, expert_ring = _rings(model, cluster)
    sent = Sent()
    if parallel.fsdp:
        reductions = 1 if parallel.fsdp_reduce == "step" else micro_batches
        sent.add(ring.gather_sends(element * rank.parameters), 2 * micro_batches)
        sent.add(ring.gather_sends(4 * ordinary), reductions)
        copies, copied_bytes = _copies_ring(rank, model, cluster)
        sent.add(copies.gather_sends(copied_bytes), 2)
    else:
        sent.add(ring.gather_sends((4 + element) * ordinary))
        sent.add(expert_ring.gather_sends((4 + element) * experts))
    return sent


def _fsdp(rank: _Rank, model: LayerModel, cluster: Cluster, *, reduces: bool) -> tuple[float, float]:
    """Each micro batch gathers the layers' weights in both passes and reduces their float32 gradients, or adds to them;
    the next layer's exchange overlaps a layer. Buffers are copied on both sides. Returns seconds of (the copies, the
    exchange) of one.
    """
    ring, element = _rings(model, cluster)[0], model.kernels.element
    if ring.size == 1:
        return 0.0, 0.0
    latency = ring.latency_s * rank.layers
    gathered = ring.gather(element * rank.parameters) + latency
    reduced = ring.gather(4 * _trained(rank, model)[0]) + latency if reduces else 0.0
    first = 1 / max(1, rank.layers)
    backward = rank.backward.total() + rank.recomputed.total()
    seconds = _exposed(gathered, rank.forward.total(), first * gathered)
    seconds += _exposed(gathered + reduced, backward, first * (gathered + reduced))
    copies = model.kernels.memory(rank.parameters * (2 * 2 * element + element + (4 if reduces else 8)))
    return copies, seconds


def _copies(rank: _Rank, model: LayerModel, cluster: Cluster) -> float:
    """HSDP: the last micro batch sums the float32 gradients of the copies, those of a layer during the next ones."""
    ring, gradient_bytes = _copies_ring(rank, model, cluster)
    summed = 2 * (ring.gather(gradient_bytes) + ring.latency_s * rank.layers)
    return _exposed(summed, rank.backward.total() + rank.recomputed.total(), summed / max(1, rank.layers))


def _copies_ring(rank: _Rank, model: LayerModel, cluster: Cluster) -> tuple[Ring, float]:
    """The ranks that have the same shard, and the bytes of its float32 gradients."""
    parallel = model.parallel
    stride = parallel.tp * parallel.shards(cluster.world_size)
    ring = Ring(cluster, max(1, cluster.world_size // stride), stride)
    return ring, 4 * _trained(rank, model)[0] * parallel.tp / stride


def _optimizer(rank: _Rank, model: LayerModel, cluster: Cluster) -> float:
    """Bytes per updated parameter: gradient read for its norm, scaled and read again (16), main weight read and written
    (8), moments read and written (AdamW 16, 8-bit 4, Muon 8), weight written (2); and every gradient is set to zero.
    Muon has 5 iterations of 6 H FLOPs per parameter (Jordan 2024).
    """
    ordinary, experts = _trained(rank, model)
    ring, expert_ring = _rings(model, cluster)
    local = ordinary / ring.size + experts / expert_ring.size
    moments = {"adamw": 16, "adamw_8bit": 4, "muon": 8}[model.work.optimizer]
    moved = local * (26 + (0 if model.work.offload else moments))
    zeroed = local if model.parallel.fsdp else ordinary + experts
    seconds = model.kernels.memory(moved + 4 * zeroed)
    if model.work.optimizer == "muon":
        seconds += 30 * model.arch.hidden_size * local / model.kernels.rates[False]
        seconds += ring.gather(4 * ordinary)
    if model.work.offload:
        seconds = max(seconds, 16 * local / (HOST_SHARE * cluster.part.host_gb_s * 1e9))
    return seconds


def _state_transfer(generation: Generation, rank: _Rank, model: LayerModel, cluster: Cluster) -> float:
    """Moments, and float32 main weights of a 16-bit model, which with fsdp are the weights."""
    if not generation.offload:
        return 0.0
    ordinary, experts = _trained(rank, model)
    ring, expert_ring = _rings(model, cluster)
    moments = 0 if model.work.offload else {"adamw": 8, "adamw_8bit": 2, "muon": 4}[model.work.optimizer]
    main = 4 if model.kernels.element < 4 and not model.parallel.fsdp else 0
    state = (moments + main) * (ordinary / ring.size + experts / expert_ring.size)
    return 2 * state / (HOST_SHARE * cluster.part.host_gb_s * 1e9) / generation.updates


def _generation(generation: Generation, ranks: Sequence[_Rank], model: LayerModel, replicas: int) -> float:
    """Answers of the largest length. A pass is a token of each sequence, one stage after the other."""
    arch, kernels, parallel = model.arch, model.kernels, model.parallel
    answers = math.ceil(generation.answers / replicas)
    slots = min(answers, generation.batch_size)
    passes = math.ceil(answers / slots) * generation.new_tokens
    tokens = max(1, model.work.seq_length - generation.new_tokens // 2)  # of a sequence, half of its answer on average
    elements = sum(mixer.state_elements(tokens, parallel.tp) for layer in arch.layers for mixer in layer.mixers)
    states = kernels.element * slots * elements / parallel.pp
    weights = [kernels.element * (rank.parameters + rank.expert_parameters) for rank in ranks]
    flops = [2 * slots * (rank.parameters + rank.expert_parameters) for rank in ranks]
    seconds = (
        max(kernels.memory(read + states, kernels=rank.layers), operations / kernels.rates[False])
        for rank, read, operations in zip(ranks, weights, flops, strict=True)
    )
    return passes * sum(seconds)


def _teacher(work: Workload, parallel: ParallelConfig, cluster: Cluster, kernels: Kernels) -> float:
    assert work.teacher is not None
    workload = replace(work, architecture=work.teacher, teacher=None, recompute="none")
    return max(rank.forward.total() for rank in _ranks(LayerModel(workload, parallel, cluster, kernels)))
