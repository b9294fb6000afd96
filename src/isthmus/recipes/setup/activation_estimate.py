"""Activations that a rank keeps for the backward pass, and the temporary memory of its steps on a GPU.

tests/fake_cuda/test_memory.py compares both with the traced memory of ranks in large layouts.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

from isthmus.config.schema import ParallelConfig, RunConfig
from isthmus.engine import compiled
from isthmus.engine.layers.cross_entropy_gpu import TEMPORARY_BYTES, elements_for
from isthmus.engine.layers.distillation_loss import CHUNK_SHARE
from isthmus.engine.layers.distillation_loss import TEMPORARY_BYTES as DIVERGENCE_BYTES
from isthmus.engine.parallel.pipeline_layout import layers_per_stage
from isthmus.families.architecture import Architecture
from isthmus.recipes.setup.model_plan import ModelPlan
from isthmus.recipes.setup.rank_model import DTYPES
from isthmus.recipes.setup.teacher_model import teacher_precision
from isthmus.train.activation_memory import layer_bytes, stage_bytes


def activation_bytes(plan: ModelPlan, config: RunConfig, precision: str, *, on_gpu: bool) -> list[int]:
    """Of all micro batches that each pipeline rank has in flight.

    An MoE layer counts as a dense layer as wide as a token's experts, plus the routed rows at a uniform load; MLA as
    attention of its widths.
    """
    parallel, arch = plan.parallel, plan.architecture
    settings = _Settings(plan, config, precision)
    is_moe = _moe_layers(arch)
    kinds = {kind: _layer_bytes(arch, settings, is_moe=kind, fused=on_gpu) for kind in set(is_moe)}
    kept, again = [0] * parallel.pp, [0] * parallel.pp
    sizes = layers_per_stage(arch.num_layers, parallel.pp, parallel.vpp)
    for stage, (size, end) in enumerate(zip(sizes, accumulate(sizes), strict=True)):
        rank, layers = stage % parallel.pp, is_moe[end - size : end]
        kept[rank] += stage_bytes(
            _as_dense(arch, is_moe=False)[0], num_layers=0, loss_tokens=settings.tokens, first=stage == 0,
            last=stage == len(sizes) - 1, **settings.sizes,
        )  # fmt: skip
        full = settings.recomputed_layers(size)
        kept[rank] += full * settings.outside * arch.hidden_size * settings.element
        kept[rank] += sum(kinds[kind] * layers[full:].count(kind) for kind in kinds)
        # Full recomputation has one layer's activations at a time.
        again[rank] = max([again[rank], *(kinds[kind] for kind in set(layers[:full]))])
    again[-1] += _taught_bytes(plan, config, precision)
    number = micro_batches(plan, config)
    return [each * _in_flight(parallel, rank, number) // parallel.vpp + more
            for rank, (each, more) in enumerate(zip(kept, again, strict=True))]  # fmt: skip


def _in_flight(parallel: ParallelConfig, rank: int, micro_batches: int) -> int:
    """Micro batches of a rank's chunks of layers: of 1F1B, or of interleaved 1F1B (arXiv 2104.04473)."""
    if parallel.vpp == 1:
        return min(parallel.pp - rank, micro_batches)
    warmup = 2 * (parallel.pp - rank - 1) + (parallel.vpp - 1) * parallel.pp
    return min(warmup + 1, parallel.vpp * micro_batches)


def _taught_bytes(plan: ModelPlan, config: RunConfig, precision: str) -> int:
    """The teacher's hidden states on the last stage: of a micro batch, with pipeline parallelism of all of a step."""
    if plan.teacher is None:
        return 0
    number = micro_batches(plan, config) if plan.parallel.pp > 1 else 1
    element = DTYPES[teacher_precision(config, precision)].itemsize
    return number * _Settings(plan, config, precision).tokens * plan.teacher.architecture.hidden_size * element


def temporary_bytes(
    plan: ModelPlan, config: RunConfig, precision: str, gpu_bytes: int, *, compiles: bool | None = None
) -> tuple[int, int]:
    """Of the backward pass of a layer, and of the loss on the last stage, on a GPU with ``gpu_bytes`` of memory.

    They follow each other, so a rank needs the larger one. ``compiles``: the GPU machine has a compiler for the loss;
    None: if this machine has one.
    """
    arch, parallel = plan.architecture, plan.parallel
    settings = _Settings(plan, config, precision)
    hidden, gated = arch.hidden_size, 2 if arch.gated else 1
    dense_width = gated * arch.ffn_hidden_size // parallel.tp
    found = [settings.tokens * 2 * hidden]  # the gathered input of a block and its gradient
    if False in _moe_layers(arch):
        found.append(settings.tokens * dense_width + 2 * settings.outside * hidden)
        if precision == "fp8":  # a float32 weight gradient, and FP8 copies of its factors and of the weight
            found.append(dense_width * (5 * hidden + settings.tokens) // settings.element)
    if arch.moe is not None:
        experts, width = arch.moe.num_experts // parallel.ep, gated * arch.moe.ffn_hidden_size // parallel.expert_tp
        found.append(4 * settings.rows * hidden)  # rows and gradients on both sides of an exchange
        found.append(experts * width * hidden + settings.rows * (width + hidden))
    layer = settings.element * max(found)
    rows = 1 if arch.score_head else math.ceil(arch.vocab_size / parallel.tp)
    logits = min(elements_for(gpu_bytes), settings.tokens * rows)
    copies = 0 if _compiles(config, compiles) else TEMPORARY_BYTES * (1 if arch.logits_softcap is None else 2)
    if plan.teacher is not None:
        logits = min(elements_for(gpu_bytes) // CHUNK_SHARE, settings.tokens * rows)
        copies = DTYPES[teacher_precision(config, precision)].itemsize + (DIVERGENCE_BYTES if copies else 0)
    loss = logits * (settings.element + copies) + settings.tokens * hidden * settings.element
    if parallel.fsdp:  # without main_grad, the gradient of the projection is float32, then also of the model's dtype
        loss = 4 * rows * hidden + max(loss, settings.element * rows * hidden)
    return layer, loss


def micro_batches(plan: ModelPlan, config: RunConfig) -> int:
    """Of a rank in a step."""
    samples = config.train.micro_batch_size * plan.parallel.dp(plan.world_size)
    return max(1, config.train.global_batch_size // samples)


class _Settings:
    def __init__(self, plan: ModelPlan, config: RunConfig, precision: str) -> None:
        parallel, train = plan.parallel, config.train
        samples = 2 if config.recipe in ("dpo", "reward") else 1
        longest = train.micro_batch_size * samples * config.data.seq_length
        longest = next((bucket for bucket in config.data.length_buckets if bucket >= longest), longest)
        sp = parallel.sequence_parallel
        self.parallel = parallel
        self.tokens = longest // parallel.cp
        """Of the longest micro batch on a rank."""
        self.outside = self.tokens // parallel.tp if sp else self.tokens
        """Outside of tensor-parallel blocks."""
        self.element = DTYPES[precision].itemsize
        self.sizes: dict[str, Any] = {
            "num_tokens": self.tokens, "bytes_per_element": self.element, "tp": parallel.tp, "sp": sp,
        }  # fmt: skip
        self._full = train.recompute_layers if train.recompute == "full" else 0
        self.recomputed = tuple(train.recompute_modules) if train.recompute == "selective" else ()
        moe = plan.architecture.moe
        self.rows = 0 if moe is None else self.outside * moe.top_k * (parallel.expert_tp if sp else 1)
        """Routed rows of this rank's experts."""

    def recomputed_layers(self, of_stage: int) -> int:
        """Layers of a stage that are recomputed as a whole."""
        return of_stage if self._full is None else min(self._full, of_stage)


def _layer_bytes(arch: Architecture, settings: _Settings, *, is_moe: bool, fused: bool) -> int:
    parallel, element = settings.parallel, settings.element
    dense, extra = _as_dense(arch, is_moe=is_moe)
    # The dense layer's names of what an MoE layer recomputes.
    names = {"moe": "mlp", "moe_act": "mlp_act"} if is_moe else {"mlp": "mlp", "mlp_act": "mlp_act"}
    names |= {name: name for name in ("core_attn", "layernorm", "rope")}
    recomputed: Any = [names[name] for name in settings.recomputed if name in names]
    total = layer_bytes(dense, recomputed=recomputed, fused=fused, **settings.sizes)
    total += settings.tokens * extra * element
    if parallel.cp > 1 and "core_attn" not in recomputed:
        # Gathered keys and values, and the joined outputs of the spans.
        gathered = 2 * dense.num_query_groups * parallel.cp + dense.num_attention_heads
        total += settings.tokens * gathered * dense.kv_channels * element // parallel.tp
    if not is_moe or "mlp" in recomputed or arch.moe is None:
        return total
    moe = arch.moe
    # Sent and returned rows, and the weighted activations.
    weighted = 0 if "mlp_act" in recomputed else moe.ffn_hidden_size // parallel.expert_tp
    routed = settings.rows * (2 * arch.hidden_size + weighted) * element
    if element < 4:  # the router computes in float32; only shared experts need its input in 16 bits
        routed += settings.outside * arch.hidden_size * (4 if moe.shared_ffn_hidden_size else 4 - element)
    return total + routed + 8 * settings.outside * moe.num_experts


def _as_dense(arch: Architecture, *, is_moe: bool) -> tuple[Architecture, int]:
    """A dense layer with similar activations, and the extra channels per token."""
    extra = 0
    changed: dict[str, Any] = {"moe": None}
    if arch.mla is not None:
        changed |= {"mla": None, "num_query_groups": arch.num_attention_heads}
        extra += arch.mla.kv_lora_rank + (arch.mla.q_lora_rank or 0)
    if is_moe and arch.moe is not None:
        changed["ffn_hidden_size"] = arch.moe.top_k * arch.moe.ffn_hidden_size + arch.moe.shared_ffn_hidden_size
    return replace(arch, **changed), extra


@functools.lru_cache(maxsize=8)
def _moe_layers(arch: Architecture) -> tuple[bool, ...]:
    """Whether each layer has experts."""
    return tuple(arch.is_moe(layer) for layer in range(arch.num_layers))


def _compiles(config: RunConfig, compiles: bool | None) -> bool:
    """Whether the loss has compiled kernels, which have no copies of the logits."""
    if config.train.compile is False or config.train.deterministic:
        return False
    return not compiled.find_compiler("cuda")[1] if compiles is None else compiles
