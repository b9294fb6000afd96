"""The time of a decoder layer for one micro batch on one rank, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, field

from isthmus.config.schema import ParallelConfig
from isthmus.families.blocks.attention import Attention
from isthmus.families.blocks.block import Linear, Recurrence
from isthmus.families.blocks.feed_forward import Experts, Mlp
from isthmus.families.blocks.latent_attention import LatentAttention
from isthmus.families.blocks.layer import Layer
from isthmus.tools.planner.cost.cluster import Cluster, Ring, Sent
from isthmus.tools.planner.cost.kernels import Kernels
from isthmus.tools.planner.cost.workload import Workload

KINDS = ("gemm", "attention", "memory", "loss", "tp", "cp", "ep")
"""Where the time goes: compute, memory-bound kernels, the output layer with its loss, and communication that nothing
overlaps.
"""
HOST_KERNEL_S, HOST_REGION_S = 5e-6, 15e-6
"""Time of the host for a kernel, and for a compiled region (``benchmarks/region_calls.py``)."""
HOST_KERNELS = {"dense": (18, 8), "experts": (21, 8), "latent": (30, 8)}
"""Kernels and regions of a layer in both passes, and what experts and latent attention add, as a traced GPU counts them
(``benchmarks/step_cost.py``).
"""
HOST_WAIT_S = 3e-5
"""The host reads the number of routed tokens and launches kernels that depend on it."""
SCORE_PASSES = 6
"""Times that plain attention reads or writes its float32 scores: mask, softmax and casts."""
HIDDEN_BY_ASYNC_TP = 0.4
"""Share of tensor-parallel communication that ``parallel.async_tp`` hides behind the matmuls next to it."""


@dataclass(slots=True)
class Times:
    """Seconds by :data:`KINDS`, and what is sent meanwhile, hidden by computation or not."""

    gemm: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    loss: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0
    sent: dict[str, Sent] = field(default_factory=dict)
    """By ``tp``, ``cp`` and ``ep``."""

    def total(self) -> float:
        return self.gemm + self.attention + self.memory + self.loss + self.tp + self.cp + self.ep

    def add(self, other: Times, times: float = 1.0) -> None:
        self.gemm += times * other.gemm
        self.attention += times * other.attention
        self.memory += times * other.memory
        self.loss += times * other.loss
        self.tp += times * other.tp
        self.cp += times * other.cp
        self.ep += times * other.ep
        for kind, sent in other.sent.items():
            self.send(kind, sent, times)

    def send(self, kind: str, sent: Sent, times: float = 1.0) -> None:
        self.sent.setdefault(kind, Sent()).add(sent, times)

    def copy(self) -> Times:
        copy = Times()
        copy.add(self)
        return copy


@dataclass(slots=True)
class LayerTime:
    forward: Times = field(default_factory=Times)
    backward: Times = field(default_factory=Times)
    recomputed: Times = field(default_factory=Times)
    """Part of the forward pass that the backward pass repeats."""
    host_s: float = 0.0
    """Of the host, which starts the kernels of both passes."""
    parameters: float = 0.0
    """Parameters of this rank, without experts."""
    expert_parameters: float = 0.0
    adapters: float = 0.0


class LayerModel:
    """Times of the layers of a workload in one layout; equal layers are computed once."""

    def __init__(self, work: Workload, parallel: ParallelConfig, cluster: Cluster, kernels: Kernels) -> None:
        arch = work.architecture
        self.work = work
        self.parallel = parallel
        self.kernels = kernels
        self.arch = arch
        self.tp: int = parallel.tp
        self.sp: bool = parallel.sequence_parallel
        self.tokens: float = work.micro_batch_size * work.sequences_per_sample * work.seq_length / parallel.cp
        """Tokens of a micro batch on this rank."""
        self.outside: float = self.tokens / self.tp if self.sp else self.tokens
        """Outside of tensor-parallel blocks."""
        self.tp_ring: Ring = Ring(cluster, parallel.tp)
        self.cp_ring: Ring = Ring(cluster, parallel.cp, parallel.tp)
        self.etp_ring: Ring = Ring(cluster, parallel.expert_tp)
        self.ep_ring: Ring = Ring(cluster, parallel.ep, parallel.expert_tp)
        self.tp_ep_ring: Ring = Ring(cluster, parallel.ep * parallel.expert_tp)
        self.trained: bool = work.lora_rank is None
        self._times: dict[int, LayerTime] = {}

    def layer(self, number: int) -> LayerTime:
        """Layer ``number``, counted from 0."""
        number = self.arch.first_equals[number]
        if number not in self._times:
            self._times[number] = self._layer(self.arch.all_layers[number])
        return self._times[number]

    def _layer(self, layer: Layer) -> LayerTime:
        time, mixing, core, feed_forward = LayerTime(), LayerTime(), LayerTime(), LayerTime()
        self._norms(time, layer)
        kinds = [
            "dense",
            *["experts"] * bool(layer.experts),
            *["latent"] * any(isinstance(mixer, LatentAttention) for mixer in layer.mixers),
        ]
        counts = [HOST_KERNELS[kind] for kind in kinds]
        time.host_s = sum(launched * HOST_KERNEL_S + regions * HOST_REGION_S for launched, regions in counts)
        for mixer in layer.mixers:
            for linear in mixer.linears(self.tp):
                self._linear(mixing, linear)
            if isinstance(mixer, Attention):
                self._core_attention(core, mixer)
                self._rope(mixing, mixer)
            elif isinstance(mixer, Recurrence):
                self._recurrence(core, mixer)
        block = layer.feed_forward
        if isinstance(block, Experts):
            self._experts(feed_forward, block)
        elif block is not None:
            self._mlp(feed_forward, block, block.linears(self.tp), block.width)
        for linear in layer.input_linears():
            self._linear(feed_forward, linear)
        for part in (mixing, core, feed_forward):
            time.forward.add(part.forward)
            time.backward.add(part.backward)
            time.recomputed.add(part.recomputed)
            time.parameters += part.parameters
            time.expert_parameters += part.expert_parameters
            time.adapters += part.adapters
        if self.work.recomputes("core_attn"):
            time.recomputed.add(core.forward)
        if self.work.recomputes("moe" if layer.experts else "mlp"):
            time.recomputed.add(feed_forward.forward)
        return time

    def _recurrence(self, core: LayerTime, mixer: Recurrence) -> None:
        """The recurrence as one matmul, and passes over the inputs and outputs of its projections.

        Both are without measurements on GPUs.
        """
        kernels, inner = self.kernels, mixer.inner_channels / self.tp
        projected = sum(linear.out for linear in mixer.linears(self.tp) if linear.split == "column")
        passes = kernels.memory(self.tokens * (3 * projected + 2 * inner) * kernels.element, 3)
        scan = kernels.gemm(self.tokens, inner, mixer.scan_depth, fp8=False) if mixer.scan_depth else 0.0
        core.forward.memory += passes
        core.backward.memory += 2 * passes
        core.forward.gemm += scan
        core.backward.gemm += 2 * scan

    def _linear(self, to: LayerTime, linear: Linear, *, rows: float | None = None, groups: float = 1) -> None:
        """A weight of this rank: forward, input gradient and, if it is trained, weight gradient.

        Of the dimension that tp ranks split, ``column`` gathers the input before it, ``row`` sums the output after it.
        """
        out, inside, fp8 = linear.out, linear.inside, linear.fp8
        kernels, m = self.kernels, (self.tokens if rows is None else rows) / groups
        forward = kernels.gemm(m, out, inside, groups=groups, fp8=fp8)
        gradient = kernels.gemm(m, inside, out, groups=groups, fp8=fp8)
        update = 0.0
        if self.trained:
            update = kernels.gemm(out, inside, m, groups=groups, fp8=fp8, sum_bytes=4)
        else:
            rank = self.work.lora_rank or 0
            self._adapter(to, m * groups, out, inside, rank)
            to.adapters += groups * rank * (out + inside)
            if self.work.quantized:
                dense = kernels.memory(groups * out * inside * (kernels.element + 0.5))
                to.forward.memory += dense
                to.backward.memory += dense
        if fp8:
            to.forward.memory += kernels.quantize(m * groups * inside)
            to.backward.memory += kernels.quantize(m * groups * out)
        to.forward.gemm += forward
        to.backward.gemm += gradient + update
        if groups == 1 and rows is None:
            to.parameters += out * inside
            self._exchange(to, linear.split, out, inside, forward, gradient, update)

    def _adapter(self, to: LayerTime, m: float, out: float, inside: float, rank: int) -> None:
        """x A and (x A) B with their sum, and three matmuls each for the gradients: limited by memory."""
        kernels = self.kernels
        passes = (inside + 3 * out) * m * kernels.element
        to.forward.memory += kernels.memory(passes, 3)
        to.backward.memory += kernels.memory(2 * passes, 5)

    def _exchange(
        self,
        to: LayerTime,
        split: str | None,
        out: float,
        inside: float,
        forward: float,
        gradient: float,
        update: float,
    ) -> None:
        """Tensor-parallel communication: the input of a column-parallel layer, the output of a row-parallel one.

        In the backward pass the input is gathered again during the input gradient, whose reduction overlaps the weight
        gradient.
        """
        if self.tp == 1 or split is None:
            return
        full = self.tokens * (inside if split == "column" else out) * self.kernels.element
        hidden = HIDDEN_BY_ASYNC_TP if self.parallel.async_tp and self.sp else 0.0
        gather_s, sent = self.tp_ring.gather(full), self.tp_ring.gather_sends(full)
        if not self.sp:
            if split == "row":
                to.forward.tp += 2 * gather_s
                to.forward.send("tp", sent, 2)
            else:
                to.backward.tp += max(0.0, 2 * gather_s - update)
                to.backward.send("tp", sent, 2)
            return
        to.forward.send("tp", sent)
        to.backward.send("tp", sent, 2 if split == "column" and self.trained else 1)
        to.forward.tp += max((1 - hidden) * gather_s, gather_s - forward if hidden else gather_s)
        if split == "row":
            to.backward.tp += max((1 - hidden) * gather_s, gather_s - gradient if hidden else gather_s)
            return
        to.backward.tp += (max(0.0, gather_s - gradient) if self.trained else 0.0) + max(0.0, gather_s - update)

    def _norms(self, to: LayerTime, layer: Layer) -> None:
        """Norms (read, write) and residual sums (two read, one written), at 1.5 times the cost backward."""
        kernels, norms = self.kernels, layer.num_norms
        width = self.outside * layer.hidden_size * kernels.element
        norm = kernels.memory(2 * norms * width, norms)
        to.forward.memory += norm + kernels.memory(6 * width, 2)
        to.backward.memory += kernels.memory((3 * norms + 3 * 2) * width, norms + 2)
        if self.work.recomputes("layernorm"):
            to.recomputed.memory += norm

    def _rope(self, to: LayerTime, attention: Attention) -> None:
        """Queries and keys are split off, rotated and, with QK norm, normalized: each read and written."""
        kernels = self.kernels
        heads = attention.num_attention_heads + max(attention.kernel_groups, self.tp)
        width = heads * attention.kv_channels / self.tp
        number = kernels.memory((4 if attention.qk_norm else 2) * self.tokens * width * kernels.element, 2)
        to.forward.memory += number
        to.backward.memory += 1.5 * number
        if self.work.recomputes("rope"):
            to.recomputed.memory += number

    def _core_attention(self, core: LayerTime, attention: Attention) -> None:
        """Causal within a sample: L tokens have L^2 / 2 pairs of query and key, a window of W at most L W.

        With context parallelism each rank has an equal part of the pairs, gathers keys and values, and reduces their
        gradients.
        """
        work = self.work
        length = work.seq_length / work.samples_per_sequence
        keys = attention.mean_keys
        pairs = self.tokens * (length / 2 if keys is None else min(length / 2, keys))
        heads, width = attention.num_attention_heads / self.tp, attention.kv_channels + attention.value_width
        if (selected := attention.selected_keys) is not None and length > selected:
            self._selected_attention(core, attention, heads, pairs, width)
            return
        core.forward.attention += self.kernels.attention(heads, pairs, width)
        core.backward.attention += self.kernels.attention(heads, pairs, width, backward=True)
        if self.parallel.cp > 1:
            groups = max(1.0, attention.kernel_groups / self.tp)
            full = self.tokens * self.parallel.cp * groups * width * self.kernels.element
            gather_s = self.cp_ring.gather(full)
            for times in (core.forward, core.backward):
                times.cp += gather_s
                times.send("cp", self.cp_ring.gather_sends(full))

    def _selected_attention(
        self, core: LayerTime, attention: Attention, heads: float, pairs: float, width: float
    ) -> None:
        """Plain PyTorch scores all pairs, of the indexer and of attention, which the backward pass repeats."""
        kernels = self.kernels
        attention_s = kernels.attention(heads, pairs, width) + kernels.memory(SCORE_PASSES * 4 * heads * pairs)
        core.forward.attention += attention_s
        core.backward.attention += 3 * attention_s
        if (scores := attention.selection_scores) is not None:
            core.forward.attention += kernels.attention(scores[0], pairs, scores[1])
            core.forward.attention += kernels.memory(SCORE_PASSES * 4 * scores[0] * pairs)

    def _activation(self, to: LayerTime, mlp: Mlp, rows: float, width: float, module: str, extra: int = 0) -> None:
        """The first matmul's output is read, the second one's input written; backward both are read, one is written."""
        gates = 2 if mlp.gated else 1
        size = rows * width * self.kernels.element
        forward = self.kernels.memory((gates + 1 + extra) * size)
        to.forward.memory += forward
        to.backward.memory += self.kernels.memory((2 * gates + 1 + extra) * size)
        if self.work.recomputes(module):
            to.recomputed.memory += forward

    def _mlp(self, to: LayerTime, mlp: Mlp, linears: list[Linear], width: float) -> None:
        first, second = linears
        self._linear(to, first)
        self._activation(to, mlp, self.tokens, width / self.tp, "mlp_act")
        self._linear(to, second)

    def _experts(self, to: LayerTime, experts: Experts) -> None:
        """Router, dispatch, grouped GEMMs of this rank's experts at a uniform load, combination."""
        parallel, kernels, hidden, mlp = self.parallel, self.kernels, experts.hidden_size, experts.in_layer
        for linear in experts.router_linears():
            router = kernels.gemm(self.outside, linear.out, linear.inside, fp8=False)
            to.forward.gemm += router
            to.backward.gemm += 2 * router
            to.parameters += linear.weights
        local_experts = experts.num_experts / parallel.ep
        source = self.outside if self.sp or self.tp == 1 else self.tokens
        rows = source * experts.top_k * parallel.expert_tp
        width = experts.ffn_hidden_size / parallel.expert_tp
        first = Linear((2 if mlp.gated else 1) * width, experts.input_size, fp8=False)
        self._linear(to, first, rows=rows, groups=local_experts)
        self._activation(to, mlp, rows, width, "moe_act", extra=1)
        self._linear(to, Linear(experts.input_size, width, fp8=False), rows=rows, groups=local_experts)
        to.expert_parameters += local_experts * experts.expert_weights / parallel.expert_tp
        if experts.shared_ffn_hidden_size:
            self._mlp(to, mlp, experts.shared_linears(self.tp), experts.shared_ffn_hidden_size)
        moved = source * experts.top_k * hidden * kernels.element
        # Rows are gathered by expert before the exchange and sorted after it, and the same for the results.
        sorts = 4 if parallel.ep > 1 else 2
        passes = kernels.memory(2 * sorts * moved, 2 * sorts) + (HOST_WAIT_S if parallel.ep > 1 else HOST_WAIT_S / 2)
        to.forward.memory += passes
        to.backward.memory += passes
        for times in (to.forward, to.backward):
            self._dispatch(times, source, moved)

    def _dispatch(self, times: Times, source: float, moved: float) -> None:
        """Send the tokens to their experts and the results back."""
        if self.work.moe_dispatcher == "allgather":
            group = self.tp_ep_ring
            gathered = source * group.size * self.arch.hidden_size * self.kernels.element
            times.ep += 2 * group.gather(gathered)
            times.send("ep", group.gather_sends(gathered), 2)
            return
        times.ep += 2 * self.ep_ring.all_to_all(moved)
        times.send("ep", self.ep_ring.all_to_all_sends(moved), 2)
        times.ep += 2 * self.etp_ring.gather(moved * self.parallel.expert_tp)
        times.send("ep", self.etp_ring.gather_sends(moved * self.parallel.expert_tp), 2)
