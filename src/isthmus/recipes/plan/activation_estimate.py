"""Activations that a rank keeps for the backward pass, and the temporary memory of its steps.

tests/fake_cuda/test_memory.py compares both with the traced memory of ranks in large layouts.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from isthmus.config.schema import ParallelConfig, RunConfig, TrainConfig
from isthmus.engine import compiled
from isthmus.engine.loss import cross_entropy_cpu
from isthmus.engine.loss.cross_entropy_gpu import TEMPORARY_BYTES, elements_for
from isthmus.engine.loss.distillation_loss import CHUNK_SHARE
from isthmus.engine.loss.distillation_loss import TEMPORARY_BYTES as DIVERGENCE_BYTES
from isthmus.engine.parallel.pipeline_layout import layers_per_stage
from isthmus.families.architecture import Architecture
from isthmus.families.blocks.block import MicroBatch
from isthmus.families.blocks.layer import Layer
from isthmus.recipes.model.rank_model import DTYPES
from isthmus.recipes.model.teacher_model import teacher_precision
from isthmus.recipes.plan.model_plan import ModelPlan
from isthmus.recipes.registry import recipe_of


@dataclass(slots=True)
class Activations:
    """Activations of a pipeline rank, in bytes."""

    tokens: int
    """Tokens of a micro batch on this rank."""
    layers: dict[Layer, dict[str, int]]
    """Parts of what a layer of each kind keeps of a micro batch."""
    kept: Counter[Layer]
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
    """Activations of all micro batches that each pipeline rank has in flight."""
    parallel, arch, train = plan.parallel, plan.architecture, config.train
    batch = micro_batch(plan, config, precision, on_gpu=on_gpu)
    terms = {layer: layer.saved_bytes(batch) for layer in arch.distinct_layers}
    number = micro_batches(plan, config)
    input_bytes = batch.outside * arch.hidden_size * batch.bytes_per_element
    in_flight = [_in_flight(parallel, rank, number) for rank in range(parallel.pp)]
    ranks = [Activations(batch.num_tokens, terms, Counter(), 0, input_bytes, 0, number) for number in in_flight]
    sizes = layers_per_stage(arch.num_layers, parallel.pp, parallel.vpp)
    for stage, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        rank, layers = ranks[stage % parallel.pp], arch.layers[end - size : end]
        first, last = stage == 0, stage == len(sizes) - 1
        rank.outside += outside_bytes(arch, batch, loss_tokens=batch.num_tokens, first=first, last=last)
        full = _recomputed_layers(train, size)
        rank.recomputed += full
        rank.kept.update(layers[full:])
        # Full recomputation has one layer's activations at a time.
        rank.once = max([rank.once, *(sum(terms[layer].values()) for layer in set(layers[:full]))])
    last_rank, mtp_layers = ranks[-1], len(arch.mtp)
    last_rank.outside += mtp_layers * input_bytes  # the gradient of their hidden states in the loss
    if mtp_layers and _recomputed_layers(train, 1):
        last_rank.recomputed += 2 * mtp_layers
        last_rank.once = max(last_rank.once, *(sum(terms[layer].values()) for layer in arch.mtp))
    else:
        last_rank.kept.update(arch.mtp)
    last_rank.once += _teacher_bytes(plan, config, precision)
    return ranks


def outside_bytes(architecture: Architecture, batch: MicroBatch, *, loss_tokens: int, first: bool, last: bool) -> int:
    """Activation bytes of a stage outside of its layers.

    Rotary tables, token ids, the last norm, and the gradient of the hidden states of the loss tokens, which the loss
    computes in the forward pass. ``first``: the stage has the embedding, ``last``: it has the loss.
    """
    arch, outside, element, total = architecture, batch.outside, batch.bytes_per_element, 0
    if arch.embedding.position == "rope":
        channels = sum(int(kind.kv_channels * kind.rotary.rotary_percent) for kind in arch.rotary_kinds if kind.rotary)
        total += batch.num_tokens * channels * element
    if first:
        total += 8 * batch.num_tokens
        # Inputs of the norm of layer inputs, and a number for each layer.
        channels = arch.num_layers * arch.embedding.layer_input_size
        total += outside * (channels * element + (4 * arch.num_layers if channels else 0))
    if last:
        total += outside * (arch.hidden_size * element + 4)
        total += loss_tokens * (arch.hidden_size * element + 8)
    return total


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
    tokens = micro_batch(plan, config, precision, on_gpu=False).num_tokens
    return number * tokens * plan.teacher.architecture.hidden_size * element


def temporary_bytes(
    plan: ModelPlan, config: RunConfig, precision: str, gpu_bytes: int | None, *, compiles: bool | None = None
) -> tuple[int, int]:
    """Temporary bytes of the backward pass of a layer, and of the loss on the last stage; they follow each other.

    ``gpu_bytes`` is the memory of a GPU, None: a CPU. ``compiles``: the GPU's machine has a compiler for the loss;
    None: if this machine has one.
    """
    arch, parallel = plan.architecture, plan.parallel
    batch = micro_batch(plan, config, precision, on_gpu=gpu_bytes is not None)
    tokens, element = batch.num_tokens, batch.bytes_per_element
    layer = element * max(kind.buffer_elements(batch, fp8=precision == "fp8") for kind in arch.distinct_layers)
    rows = 1 if arch.head.score_head else math.ceil(arch.vocab_size / parallel.tp)
    hidden_bytes = tokens * arch.hidden_size * element
    teacher_element = 0 if plan.teacher is None else DTYPES[teacher_precision(config, precision)].itemsize
    if gpu_bytes is None:
        logits = min(cross_entropy_cpu.CHUNK_ELEMENTS, tokens * rows)
        block = 4 * min(cross_entropy_cpu.BLOCK_ELEMENTS, logits) if element < 4 else 0
        loss = logits * (element + teacher_element) + block + hidden_bytes
    else:
        logits = min(elements_for(gpu_bytes) // (CHUNK_SHARE if teacher_element else 1), tokens * rows)
        copies = 0 if _compiles(config, compiles) else TEMPORARY_BYTES * (1 if arch.head.logits_softcap is None else 2)
        copies = teacher_element + (DIVERGENCE_BYTES if copies else 0) if teacher_element else copies
        loss = logits * (element + copies) + hidden_bytes
    if parallel.fsdp:  # without main_grad, the gradient of the projection is float32, then also of the model's dtype
        loss = 4 * rows * arch.hidden_size + max(loss, element * rows * arch.hidden_size)
    return layer, loss


def micro_batches(plan: ModelPlan, config: RunConfig) -> int:
    """Number of micro batches of a rank in a step."""
    samples = config.train.micro_batch_size * plan.parallel.dp(plan.world_size)
    return max(1, config.train.global_batch_size // samples)


def micro_batch(plan: ModelPlan, config: RunConfig, precision: str, *, on_gpu: bool) -> MicroBatch:
    """The longest micro batch of a rank."""
    parallel, train = plan.parallel, config.train
    longest = train.micro_batch_size * recipe_of(config).samples_per_sequence * config.data.seq_length
    longest = next((bucket for bucket in config.data.length_buckets if bucket >= longest), longest)
    return MicroBatch(
        num_tokens=longest // parallel.cp,
        bytes_per_element=DTYPES[precision].itemsize,
        longest=config.data.seq_length,
        tp=parallel.tp,
        sp=parallel.sequence_parallel,
        cp=parallel.cp,
        ep=parallel.ep,
        etp=parallel.expert_tp,
        recomputed=frozenset(train.recompute_modules if train.recompute == "selective" else ()),
        on_gpu=on_gpu,
    )


def _recomputed_layers(train: TrainConfig, num_layers: int) -> int:
    """Layers of a stage that are recomputed as a whole."""
    full = train.recompute_layers if train.recompute == "full" else 0
    return num_layers if full is None else min(full, num_layers)


def _compiles(config: RunConfig, compiles: bool | None) -> bool:
    """Whether the loss has compiled kernels, which have no copies of the logits."""
    if config.train.compile is False or config.train.deterministic:
        return False
    return not compiled.find_compiler("cuda")[1] if compiles is None else compiles
