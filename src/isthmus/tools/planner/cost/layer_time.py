"""The time of a decoder layer for one micro batch on one rank, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, field

from isthmus.config.schema import ParallelConfig
from isthmus.families.architecture import Architecture
from isthmus.families.mixer_sizes import KeyIndexer
from isthmus.tools.planner.cost.cluster import Cluster, Ring
from isthmus.tools.planner.cost.kernels import Kernels
from isthmus.tools.planner.cost.mixer_shapes import MIXERS, MixerShape, mixer_shape
from isthmus.tools.planner.cost.workload import Workload

KINDS = ("gemm", "attention", "memory", "tp", "cp", "ep")
"""Where the time of a layer goes: compute, memory-bound kernels, and communication that nothing overlaps."""
HOST_WAIT_S = 3e-5
"""The host reads the number of routed tokens and launches kernels that depend on it."""
SCORE_PASSES = 6
"""Times that plain attention reads or writes its float32 scores: mask, softmax and casts."""
HIDDEN_BY_ASYNC_TP = 0.4
"""Share of tensor-parallel communication that ``parallel.async_tp`` hides behind the matmuls next to it."""


@dataclass(slots=True)
class Times:
    """Seconds by :data:`KINDS`."""

    gemm: float = 0.0
    attention: float = 0.0
    memory: float = 0.0
    tp: float = 0.0
    cp: float = 0.0
    ep: float = 0.0

    def total(self) -> float:
        return self.gemm + self.attention + self.memory + self.tp + self.cp + self.ep

    def add(self, other: Times, times: float = 1.0) -> None:
        self.gemm += times * other.gemm
        self.attention += times * other.attention
        self.memory += times * other.memory
        self.tp += times * other.tp
        self.cp += times * other.cp
        self.ep += times * other.ep


@dataclass(slots=True)
class LayerTime:
    forward: Times = field(default_factory=Times)
    backward: Times = field(default_factory=Times)
    recomputed: Times = field(default_factory=Times)
    """Part of the forward pass that the backward pass repeats."""
    parameters: float = 0.0
    """Parameters of this rank, without experts."""
    expert_parameters: float = 0.0
    adapters: float = 0.0


class LayerModel:
    """Times of the layers of a workload in one layout; equal layers are computed once."""

    def __init__(self, work: Workload, parallel: ParallelConfig, cluster: Cluster, kernels: Kernels) -> None:
        arch = work.architecture
        self.work, self.parallel, self.kernels, self.arch = work, parallel, kernels, arch
        self.tp = parallel.tp
        self.sp = parallel.sequence_parallel
        self.tokens = work.micro_batch_size * work.sequences_per_sample * work.seq_length / parallel.cp
        """Tokens of a micro batch on this rank."""
        self.outside = self.tokens / self.tp if self.sp else self.tokens
        """Outside of tensor-parallel blocks."""
        self.tp_ring = Ring(cluster, parallel.tp)
        self.cp_ring = Ring(cluster, parallel.cp, parallel.tp)
        self.etp_ring = Ring(cluster, parallel.expert_tp)
        self.ep_ring = Ring(cluster, parallel.ep, parallel.expert_tp)
        self.tp_ep_ring = Ring(cluster, parallel.ep * parallel.expert_tp)
        self.trained = work.lora_rank is None
        self._times: dict[tuple[frozenset[str], int | None], LayerTime] = {}

    def layer(self, number: int) -> LayerTime:
        """Layer ``number``, counted from 0."""
        kind = self.arch.layer_kinds(number), self.arch.window(number)
        if kind not in self._times:
            self._times[kind] = self._layer(*kind)
        return self._times[kind]

    def _layer(self, kinds: frozenset[str], window: int | None) -> LayerTime:
        time, is_moe = LayerTime(), "moe" in kinds
        mixing, core, feed_forward = LayerTime(), LayerTime(), LayerTime()
        self._norms(time)
        if "attention" in kinds:
            arch = self.arch if window is None else self.arch.windowed
            self._projections(mixing, arch, has_keys=not kinds & {"full_queries", "windowed_queries"})
            core = self._core_attention(arch, window)
            self._rope(mixing, arch)
        for mixer in MIXERS & kinds:
            self._mixer(mixing, core, mixer_shape(self.arch, mixer))
        if is_moe:
            self._experts(feed_forward)
        elif kinds & {"dense", "wide"}:
            self._mlp(feed_forward, (2 if "wide" in kinds else 1) * self.arch.ffn_hidden_size)
        if width := self.arch.layer_input_size:
            # A layer's part of the projection of embeddings, its gate, and the projection of what is gated.
            for rows, columns in ((width, self.arch.hidden_size),) * 2 + ((self.arch.hidden_size, width),):
                self._linear(feed_forward, rows, columns, split=None, fp8=False)
        for part in (mixing, core, feed_forward):
            time.forward.add(part.forward)
            time.backward.add(part.backward)
            time.recomputed.add(part.recomputed)
            time.parameters += part.parameters
            time.expert_parameters += part.expert_parameters
            time.adapters += part.adapters
        if self.work.recomputes("core_attn"):
            time.recomputed.add(core.forward)
        if self.work.recomputes("moe" if is_moe else "mlp"):
            time.recomputed.add(feed_forward.forward)
        return time

    def _mixer(self, to: LayerTime, core: LayerTime, shape: MixerShape) -> None:
        """Projections as linear layers; the recurrence as one matmul, and passes over its inputs and outputs.

        Both are without measurements on GPUs.
        """
        inner, hidden, kernels = shape.inner / self.tp, self.arch.hidden_size, self.kernels
        self._linear(to, shape.projected / self.tp, hidden, split="column")
        self._linear(to, hidden, inner, split="row")
        passes = kernels.memory(self.tokens * (3 * shape.projected / self.tp + 2 * inner) * kernels.element, 3)
        scan = kernels.gemm(self.tokens, inner, shape.depth, fp8=False) if shape.depth else 0.0
        core.forward.memory += passes
        core.backward.memory += 2 * passes
        core.forward.gemm += scan
        core.backward.gemm += 2 * scan

    def _linear(
        self,
        to: LayerTime,
        out: float,
        inside: float,
        *,
        split: str | None,
        rows: float | None = None,
        groups: float = 1,
        fp8: bool = True,
    ) -> None:
        """A weight [out, inside] of this rank; forward, input gradient and, if it is trained, weight gradient.

        ``split`` is the dimension over which tp ranks split the weight: ``column`` gathers the input before it, ``row``
        sums the output after it.
        """
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
            self._exchange(to, split, out, inside, forward, gradient, update)

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
        gather_s = self.tp_ring.gather(full)
        if not self.sp:
            if split == "row":
                to.forward.tp += 2 * gather_s
            else:
                to.backward.tp += max(0.0, 2 * gather_s - update)
            return
        to.forward.tp += max((1 - hidden) * gather_s, gather_s - forward if hidden else gather_s)
        if split == "row":
            to.backward.tp += max((1 - hidden) * gather_s, gather_s - gradient if hidden else gather_s)
            return
        to.backward.tp += (max(0.0, gather_s - gradient) if self.trained else 0.0) + max(0.0, gather_s - update)

    def _norms(self, to: LayerTime) -> None:
        """Two norms (read, write) and residual sums (two read, one written), at 1.5 times the cost backward."""
        arch, kernels = self.arch, self.kernels
        norms = {"pre": 2, "post": 2, "sandwich": 4, "parallel": 1, "parallel_two_norms": 2}[arch.form]
        width = self.outside * arch.hidden_size * kernels.element
        norm = kernels.memory(2 * norms * width, norms)
        to.forward.memory += norm + kernels.memory(6 * width, 2)
        to.backward.memory += kernels.memory((3 * norms + 3 * 2) * width, norms + 2)
        if self.work.recomputes("layernorm"):
            to.recomputed.memory += norm

    def _projections(self, to: LayerTime, arch: Architecture, *, has_keys: bool) -> None:
        tp = self.tp
        width = arch.num_attention_heads * arch.kv_channels / tp
        if arch.head_gate:
            self._linear(to, arch.num_attention_heads / tp, arch.hidden_size, split="column")
        if (mla := arch.mla) is None:
            key_width = arch.kv_channels + (0 if arch.values_are_keys else arch.value_width)
            keys = max(1.0, arch.num_query_groups / tp) * key_width if has_keys else 0.0
            self._linear(to, width + keys, arch.hidden_size, split="column")
            self._linear(to, arch.hidden_size, arch.num_attention_heads * arch.value_width / tp, split="row")
            return
        values = arch.num_attention_heads * mla.v_head_dim / tp
        if mla.q_lora_rank is None:
            self._linear(to, width, arch.hidden_size, split="column")
        else:
            self._linear(to, mla.q_lora_rank, arch.hidden_size, split=None, fp8=False)
            self._linear(to, width, mla.q_lora_rank, split="column")
        self._linear(to, mla.kv_lora_rank + mla.qk_rope_head_dim, arch.hidden_size, split=None, fp8=False)
        up = arch.num_attention_heads * (mla.qk_nope_head_dim + mla.v_head_dim) / tp
        self._linear(to, up, mla.kv_lora_rank, split="column")
        self._linear(to, arch.hidden_size, values, split="row")

    def _rope(self, to: LayerTime, arch: Architecture) -> None:
        """Queries and keys are split off, rotated and, with QK norm, normalized: each read and written."""
        kernels = self.kernels
        groups = arch.num_attention_heads if arch.mla is not None else arch.num_query_groups
        width = (arch.num_attention_heads + max(groups, self.tp)) * arch.kv_channels / self.tp
        number = kernels.memory((4 if arch.qk_norm else 2) * self.tokens * width * kernels.element, 2)
        to.forward.memory += number
        to.backward.memory += 1.5 * number
        if self.work.recomputes("rope"):
            to.recomputed.memory += number

    def _core_attention(self, arch: Architecture, window: int | None) -> LayerTime:
        """Causal within a sample: L tokens have L^2 / 2 pairs of query and key, a window of W at most L W.

        With context parallelism each rank has an equal part of the pairs, gathers keys and values, and reduces their
        gradients.
        """
        time, work = LayerTime(), self.work
        length = work.seq_length / work.samples_per_sequence
        keys = length / 2 if window is None else window / (2 if arch.window_kind == "chunks" else 1)
        pairs = self.tokens * min(length / 2, keys)
        heads, width = arch.num_attention_heads / self.tp, arch.kv_channels + arch.value_width
        if arch.indexer is not None and length > arch.indexer.top_k:
            return self._selected_attention(heads, pairs, width, arch.indexer)
        time.forward.attention = self.kernels.attention(heads, pairs, width)
        time.backward.attention = self.kernels.attention(heads, pairs, width, backward=True)
        if self.parallel.cp > 1:
            groups = heads if arch.mla is not None else max(1.0, arch.num_query_groups / self.tp)
            full = self.tokens * self.parallel.cp * groups * width * self.kernels.element
            time.forward.cp = time.backward.cp = self.cp_ring.gather(full)
        return time

    def _selected_attention(self, heads: float, pairs: float, width: float, indexer: KeyIndexer) -> LayerTime:
        """Plain PyTorch scores all pairs, of the indexer and of attention, which the backward pass repeats."""
        kernels, time = self.kernels, LayerTime()
        attention_s = kernels.attention(heads, pairs, width) + kernels.memory(SCORE_PASSES * 4 * heads * pairs)
        time.forward.attention = attention_s + kernels.attention(indexer.num_heads, pairs, indexer.head_dim)
        time.forward.attention += kernels.memory(SCORE_PASSES * 4 * indexer.num_heads * pairs)
        time.backward.attention = 3 * attention_s
        return time

    def _activation(self, to: LayerTime, rows: float, width: float, module: str, extra: int = 0) -> None:
        """The first matmul's output is read, the second one's input written; backward both are read, one is written."""
        gates = 2 if self.arch.gated else 1
        size = rows * width * self.kernels.element
        forward = self.kernels.memory((gates + 1 + extra) * size)
        to.forward.memory += forward
        to.backward.memory += self.kernels.memory((2 * gates + 1 + extra) * size)
        if self.work.recomputes(module):
            to.recomputed.memory += forward

    def _mlp(self, to: LayerTime, ffn_width: float) -> None:
        arch, width = self.arch, ffn_width / self.tp
        self._linear(to, (2 if arch.gated else 1) * width, arch.hidden_size, split="column")
        self._activation(to, self.tokens, width, "mlp_act")
        self._linear(to, arch.hidden_size, width, split="row")

    def _experts(self, to: LayerTime) -> None:
        """Router, dispatch, grouped GEMMs of this rank's experts at a uniform load, combination."""
        arch, moe, parallel, kernels = self.arch, self.arch.moe, self.parallel, self.kernels
        assert moe is not None
        router = kernels.gemm(self.outside, moe.num_experts, arch.hidden_size, fp8=False)
        to.forward.gemm += router
        to.backward.gemm += 2 * router
        to.parameters += arch.hidden_size * moe.num_experts
        local_experts = moe.num_experts / parallel.ep
        source = self.outside if self.sp or self.tp == 1 else self.tokens
        rows = source * moe.top_k * parallel.expert_tp
        width = moe.ffn_hidden_size / parallel.expert_tp
        self._linear(
            to,
            (2 if arch.gated else 1) * width,
            arch.hidden_size,
            split=None,
            rows=rows,
            groups=local_experts,
            fp8=False,
        )
        self._activation(to, rows, width, "moe_act", extra=1)
        self._linear(to, arch.hidden_size, width, split=None, rows=rows, groups=local_experts, fp8=False)
        matrices = 3 if arch.gated else 2
        to.expert_parameters += local_experts * matrices * width * arch.hidden_size
        if moe.shared_ffn_hidden_size:
            self._mlp(to, moe.shared_ffn_hidden_size)
        moved = source * moe.top_k * arch.hidden_size * kernels.element
        # Rows are gathered by expert before the exchange and sorted after it, and the same for the results.
        sorts = 4 if parallel.ep > 1 else 2
        passes = kernels.memory(2 * sorts * moved, 2 * sorts) + (HOST_WAIT_S if parallel.ep > 1 else HOST_WAIT_S / 2)
        to.forward.memory += passes
        to.backward.memory += passes
        exchange = self._dispatch(source, moved)
        to.forward.ep += exchange
        to.backward.ep += exchange

    def _dispatch(self, source: float, moved: float) -> float:
        """Seconds to send the tokens to their experts and the results back."""
        if self.work.moe_dispatcher == "allgather":
            group = self.tp_ep_ring
            return 2 * group.gather(source * group.size * self.arch.hidden_size * self.kernels.element)
        both = 2 * self.ep_ring.all_to_all(moved)
        return both + 2 * self.etp_ring.gather(moved * self.parallel.expert_tp)
