"""Activations that a rank keeps for the backward pass, and the temporary memory of its steps.

tests/fake_cuda/test_memory.py compares both with the traced memory of ranks in large layouts.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Any

from isthmus.config.schema import ParallelConfig, RunConfig
from isthmus.engine import compiled
from isthmus.engine.attention.sparse_attention import BLOCK_QUERIES
from isthmus.engine.loss import cross_entropy_cpu
from isthmus.engine.loss.cross_entropy_gpu import TEMPORARY_BYTES, elements_for
from isthmus.engine.loss.distillation_loss import CHUNK_SHARE
from isthmus.engine.loss.distillation_loss import TEMPORARY_BYTES as DIVERGENCE_BYTES
from isthmus.engine.parallel.pipeline_layout import layers_per_stage
from isthmus.families.architecture import Architecture
from isthmus.recipes.model.rank_model import DTYPES
from isthmus.recipes.model.teacher_model import teacher_precision
from isthmus.recipes.plan.model_plan import ModelPlan
from isthmus.recipes.registry import recipe_of
from isthmus.train.activation_memory import ATTENTION, layer_terms, stage_bytes
from isthmus.train.mixer_memory import mixer_buffers


@dataclass(slots=True)
class Activations:
    """Activations of a pipeline rank, in bytes."""

    tokens: int
    """Tokens of a micro batch on this rank."""
    layers: dict[str, dict[str, int]]
    """Parts of what a layer of each kind (:func:`_layer_kinds`) keeps of a micro batch."""
    kept: Counter[str]
    """Layers of each kind that are not recomputed as a whole."""
    recomputed: int = 0
    """Layers that are: each keeps its ``input_bytes``."""
    input_bytes: int = 0
    outside: int = 0
    """Bytes of a micro batch outside of the layers: tables, token ids, last norm, gradient of the hidden states."""
    in_flight: Fraction = Fraction(1)
    """Micro batches; with virtual stages a fraction of their layers."""
    once: int = 0
    """A recomputed layer in its backward pass, and the hidden states of a teacher."""

    @property
    def total(self) -> int:
        per_micro_batch = self.outside + self.recomputed * self.input_bytes
        per_micro_batch += sum(count * sum(self.layers[kind].values()) for kind, count in self.kept.items())
        return int(per_micro_batch * self.in_flight) + self.once


def activations(plan: ModelPlan, config: RunConfig, precision: str, *, on_gpu: bool) -> list[Activations]:
    """Activations of all micro batches that each pipeline rank has in flight.

    An MoE layer counts as a dense layer as wide as a token's experts, plus the routed rows at a uniform load; MLA as
    attention of its widths.
    """
    parallel, arch = plan.parallel, plan.architecture
    settings = _Settings(plan, config, precision)
    kinds = _layer_kinds(arch)
    terms = {kind: _layer_terms(arch, kinds.index(kind), settings, fused=on_gpu) for kind in set(kinds)}
    number, dense = micro_batches(plan, config), _as_dense(arch, is_moe=False)
    input_bytes = settings.outside * arch.hidden_size * settings.element
    in_flight = [_in_flight(parallel, rank, number) for rank in range(parallel.pp)]
    ranks = [Activations(settings.tokens, terms, Counter(), 0, input_bytes, 0, number) for number in in_flight]
    sizes = layers_per_stage(arch.num_layers, parallel.pp, parallel.vpp)
    for stage, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        rank, layers = ranks[stage % parallel.pp], kinds[end - size : end]
        rank.outside += stage_bytes(
            dense,
            num_layers=0,
            loss_tokens=settings.tokens,
            first=stage == 0,
            last=stage == len(sizes) - 1,
            **settings.sizes,
        )
        full = settings.recomputed_layers(size)
        rank.recomputed += full
        rank.kept.update(layers[full:])
        # Full recomputation has one layer's activations at a time.
        rank.once = max([rank.once, *(sum(terms[kind].values()) for kind in set(layers[:full]))])
    _add_mtp_layers(ranks[-1], arch, settings, on_gpu=on_gpu)
    ranks[-1].once += _teacher_bytes(plan, config, precision)
    return ranks


def _add_mtp_layers(last: Activations, arch: Architecture, settings: _Settings, *, on_gpu: bool) -> None:
    """MTP layers: each is a layer with 6 T H more, of norms and of the projection of hidden states and embeddings."""
    if not arch.mtp_layers:
        return
    terms = _layer_terms(arch, arch.num_layers, settings, fused=on_gpu)
    last.layers = last.layers | {"MTP": terms | {"6 T H of joined embeddings": 6 * last.input_bytes}}
    last.outside += arch.mtp_layers * last.input_bytes  # the gradient of its hidden states in the loss
    if settings.recomputed_layers(1):
        last.recomputed += 2 * arch.mtp_layers
        last.once = max(last.once, sum(last.layers["MTP"].values()))
    else:
        last.kept["MTP"] = arch.mtp_layers


def _in_flight(parallel: ParallelConfig, rank: int, micro_batches: int) -> Fraction:
    """Micro batches of 1F1B; of interleaved 1F1B (arXiv 2104.04473), whose chunks have 1 / vpp of a rank's layers."""
    if parallel.vpp == 1:
        return Fraction(min(parallel.pp - rank, micro_batches))
    warmup = 2 * (parallel.pp - rank - 1) + (parallel.vpp - 1) * parallel.pp
    return Fraction(min(warmup + 1, parallel.vpp * micro_batches), parallel.vpp)


def _teacher_bytes(plan: ModelPlan, config: RunConfig, precision: str) -> int:
    """The teacher's hidden states on the last stage: of a micro batch, with pipeline parallelism of all of a step."""
    if plan.teacher is None:
        return 0
    number = micro_batches(plan, config) if plan.parallel.pp > 1 else 1
    element = DTYPES[teacher_precision(config, precision)].itemsize
    return number * _Settings(plan, config, precision).tokens * plan.teacher.architecture.hidden_size * element


def temporary_bytes(
    plan: ModelPlan, config: RunConfig, precision: str, gpu_bytes: int | None, *, compiles: bool | None = None
) -> tuple[int, int]:
    """Temporary bytes of the backward pass of a layer, and of the loss on the last stage; they follow each other.

    ``gpu_bytes`` is the memory of a GPU, None: a CPU. ``compiles``: the GPU's machine has a compiler for the loss;
    None: if this machine has one.
    """
    arch, parallel = plan.architecture, plan.parallel
    settings = _Settings(plan, config, precision)
    layer = settings.element * max(_layer_buffers(arch, settings, fp8=precision == "fp8", on_gpu=gpu_bytes is not None))
    rows = 1 if arch.score_head else math.ceil(arch.vocab_size / parallel.tp)
    hidden_bytes = settings.tokens * arch.hidden_size * settings.element
    teacher_element = 0 if plan.teacher is None else DTYPES[teacher_precision(config, precision)].itemsize
    if gpu_bytes is None:
        logits = min(cross_entropy_cpu.CHUNK_ELEMENTS, settings.tokens * rows)
        block = 4 * min(cross_entropy_cpu.BLOCK_ELEMENTS, logits) if settings.element < 4 else 0
        loss = logits * (settings.element + teacher_element) + block + hidden_bytes
    else:
        logits = min(elements_for(gpu_bytes) // (CHUNK_SHARE if teacher_element else 1), settings.tokens * rows)
        copies = 0 if _compiles(config, compiles) else TEMPORARY_BYTES * (1 if arch.logits_softcap is None else 2)
        copies = teacher_element + (DIVERGENCE_BYTES if copies else 0) if teacher_element else copies
        loss = logits * (settings.element + copies) + hidden_bytes
    if parallel.fsdp:  # without main_grad, the gradient of the projection is float32, then also of the model's dtype
        loss = 4 * rows * arch.hidden_size + max(loss, settings.element * rows * arch.hidden_size)
    return layer, loss


def _layer_buffers(arch: Architecture, settings: _Settings, *, fp8: bool, on_gpu: bool) -> list[int]:
    """Elements at different times of a layer's backward pass. A CPU also has separate ones for each activation."""
    parallel, hidden, gated = settings.parallel, arch.hidden_size, 2 if arch.gated else 1
    eager = 0 if on_gpu else 2
    dense = arch.ffn_hidden_size // parallel.tp
    buffers = [settings.tokens * 2 * hidden]  # the gathered input of a block and its gradient
    if any(kind.startswith("dense") for kind in _layer_kinds(arch)):
        buffers.append(settings.tokens * (gated + eager) * dense + 2 * settings.outside * hidden)
        if fp8:  # a float32 weight gradient, and FP8 copies of its factors and of the weight
            buffers.append(gated * dense * (5 * hidden + settings.tokens) // settings.element)
    if arch.indexer is not None and settings.longest > arch.indexer.top_k:  # float32 scores, probabilities, gradients
        heads = 4 * arch.num_attention_heads // parallel.tp + 2 * arch.indexer.num_heads
        buffers.append(4 * heads * BLOCK_QUERIES * settings.longest // settings.element)
    buffers += [
        mixer_buffers(arch, mixer, num_tokens=settings.tokens, bytes_per_element=settings.element, tp=parallel.tp)
        for mixer in {mixer for mixers in arch.mixers for mixer in mixers} - {"attention"}
    ]
    if arch.moe is not None:
        experts, width = arch.moe.num_experts // parallel.ep, arch.moe.ffn_hidden_size // parallel.expert_tp
        buffers.append(4 * settings.rows * hidden)  # rows and gradients on both sides of an exchange
        buffers.append(experts * gated * width * hidden + settings.rows * ((gated + eager) * width + hidden))
    return buffers


def micro_batches(plan: ModelPlan, config: RunConfig) -> int:
    """Number of micro batches of a rank in a step."""
    samples = config.train.micro_batch_size * plan.parallel.dp(plan.world_size)
    return max(1, config.train.global_batch_size // samples)


class _Settings:
    def __init__(self, plan: ModelPlan, config: RunConfig, precision: str) -> None:
        parallel, train = plan.parallel, config.train
        samples = recipe_of(config).samples_per_sequence
        longest = train.micro_batch_size * samples * config.data.seq_length
        longest = next((bucket for bucket in config.data.length_buckets if bucket >= longest), longest)
        sp = parallel.sequence_parallel
        self.parallel = parallel
        self.longest = config.data.seq_length
        """Tokens of a sample."""
        self.tokens = longest // parallel.cp
        """Tokens of the longest micro batch on a rank."""
        self.outside = self.tokens // parallel.tp if sp else self.tokens
        """Outside of tensor-parallel blocks."""
        self.element = DTYPES[precision].itemsize
        self.sizes: dict[str, Any] = {
            "num_tokens": self.tokens,
            "bytes_per_element": self.element,
            "tp": parallel.tp,
            "sp": sp,
        }
        self._full = train.recompute_layers if train.recompute == "full" else 0
        self.recomputed = tuple(train.recompute_modules) if train.recompute == "selective" else ()
        moe = plan.architecture.moe
        self.rows = 0 if moe is None else self.outside * moe.top_k * (parallel.expert_tp if sp else 1)
        """Routed rows of this rank's experts."""

    def recomputed_layers(self, num_layers: int) -> int:
        """Layers of a stage that are recomputed as a whole."""
        return num_layers if self._full is None else min(self._full, num_layers)


def _layer_terms(arch: Architecture, layer: int, settings: _Settings, *, fused: bool) -> dict[str, int]:
    """Bytes by part of a layer, from 0; rows are tokens that are routed to an expert of this rank."""
    parallel, element, is_moe = settings.parallel, settings.element, arch.is_moe(layer)
    blocks: Any = {"mixers": arch.mixers_of(layer), "has_mlp": layer not in arch.layers_without_mlp}
    has_keys, width = int(arch.key_source(layer) is None), arch.mlp_width(layer)
    arch = replace(arch.attention_of(layer), ffn_hidden_size=width)
    dense = _as_dense(arch, is_moe=is_moe)
    queries = replace(dense, num_query_groups=has_keys * dense.num_query_groups)
    # The dense layer's names of what an MoE layer recomputes.
    names = {"moe": "mlp", "moe_act": "mlp_act"} if is_moe else {"mlp": "mlp", "mlp_act": "mlp_act"}
    names |= {name: name for name in ("core_attn", "layernorm", "rope")}
    recomputed: Any = [names[name] for name in settings.recomputed if name in names]
    terms = layer_terms(queries, recomputed=recomputed, fused=fused, **settings.sizes, **blocks)
    if arch.mla is not None and "attention" in blocks["mixers"]:
        terms |= _latent_terms(arch, settings, recomputed="core_attn" in recomputed, on_gpu=fused)
    if parallel.cp > 1 and "core_attn" not in recomputed:
        # Gathered keys and values, and the joined outputs of the spans.
        gathered = dense.num_query_groups * parallel.cp
        width = gathered * dense.kv_channels + (gathered + dense.num_attention_heads) * dense.value_width
        terms["gathered keys and values, joined outputs"] = settings.tokens * width * element // parallel.tp
    if not is_moe or "mlp" in recomputed or arch.moe is None:
        return terms
    moe = arch.moe
    # Rows, and returned ones if they are exchanged, and the weighted activations.
    copies = 2 if parallel.ep * parallel.expert_tp > 1 else 1
    weighted = 0 if "mlp_act" in recomputed else moe.ffn_hidden_size // parallel.expert_tp
    terms["rows sent to the experts and returned"] = settings.rows * (copies * arch.hidden_size + weighted) * element
    router = 8 * settings.outside * moe.num_experts
    if element < 4:  # the router computes in float32; only shared experts need its input in 16 bits
        router += settings.outside * arch.hidden_size * (4 if moe.shared_ffn_hidden_size else 4 - element)
    router += 4 * settings.outside * arch.hidden_size if moe.router_norm else 0
    terms["router"] = router
    if moe.branch_norms:  # inputs of the norms after routed and shared experts, and numbers of all four
        terms["norms of the experts"] = settings.outside * (2 * arch.hidden_size * element + 16)
    return terms


def _latent_terms(arch: Architecture, settings: _Settings, *, recomputed: bool, on_gpu: bool) -> dict[str, int]:
    """Attention with low-rank queries, keys and values; GPU kernels have values and outputs as wide as keys."""
    mla = arch.mla
    assert mla is not None
    keys, values = arch.kv_channels, mla.v_head_dim
    attention = keys + (2 * keys if on_gpu else mla.qk_nope_head_dim + values)  # keys, values; output
    gated = 1 + values if arch.head_gate else 0
    channels = arch.num_attention_heads * (keys + values + gated + (0 if recomputed else attention))
    selected = 0 if arch.indexer is None or settings.longest <= arch.indexer.top_k else arch.indexer.top_k
    low_rank = 2 * ((mla.q_lora_rank or 0) + mla.kv_lora_rank + mla.qk_rope_head_dim)
    return {
        ATTENTION: settings.tokens * channels // settings.parallel.tp * settings.element,
        "low-rank queries, keys and values, with their norms": settings.tokens * low_rank * settings.element,
        "selected keys": 4 * settings.tokens * selected,
    }


def _as_dense(arch: Architecture, *, is_moe: bool) -> Architecture:
    """A dense layer with similar activations; attention of MLA is replaced by :func:`_latent_terms`."""
    changed: dict[str, Any] = {"moe": None}
    if arch.mla is not None:
        changed |= {"mla": None, "num_query_groups": arch.num_attention_heads}
    if is_moe and arch.moe is not None:
        changed["ffn_hidden_size"] = arch.moe.top_k * arch.moe.ffn_hidden_size + arch.moe.shared_ffn_hidden_size
    return replace(arch, **changed)


@functools.lru_cache(maxsize=8)
def _layer_kinds(arch: Architecture) -> tuple[str, ...]:
    """Layers with equal activations have equal kinds, which start with ``dense``, ``moe`` or ``no mlp``."""

    def kind(layer: int) -> str:
        block = "moe" if arch.is_moe(layer) else "no mlp" if layer in arch.layers_without_mlp else "dense"
        mixers = arch.mixers_of(layer)
        windowed = [] if arch.attention_of(layer) is arch else ["windowed"]
        if arch.key_source(layer) is not None:
            windowed.append("queries of twice the width" if arch.sharing_layers_wide else "queries")
        return ", ".join([block, *windowed, *([] if mixers == ("attention",) else mixers or ["no mixer"])])

    return tuple(map(kind, range(arch.num_layers)))


def _compiles(config: RunConfig, compiles: bool | None) -> bool:
    """Whether the loss has compiled kernels, which have no copies of the logits."""
    if config.train.compile is False or config.train.deterministic:
        return False
    return not compiled.find_compiler("cuda")[1] if compiles is None else compiles
