"""The matmuls of a micro batch on a rank, by formula, and whether ``tune.file`` has choices for them."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from isthmus.config.schema import RunConfig
from isthmus.engine.linear.fp8_quantization import named_scaling, width_multiple
from isthmus.engine.linear.matmul_table import MatmulShape
from isthmus.engine.linear.tuned_matmuls import check_made_for, made_for, read_tuned, tune_path
from isthmus.engine.loss import cross_entropy_cpu, cross_entropy_gpu
from isthmus.engine.loss.linear_cross_entropy import chunk_bounds
from isthmus.errors import UsageError
from isthmus.families.matched_tensors import hidden_matrices
from isthmus.families.rules.shard import Layout, local_shape
from isthmus.platforms.base import Platform
from isthmus.recipes.model.rank_model import DTYPES
from isthmus.recipes.plan.model_plan import ModelPlan
from isthmus.recipes.registry import recipe_of

OUTPUT = "output_layer"
_LAYER = re.compile(r"^.*layers\.\d+\.")
_WITHIN_MIXER = re.compile(r"\.(x_proj|dt_proj)\.weight$")
"""Small matmuls of Mamba-1 that do not go through the linear layers."""


@dataclass(frozen=True, slots=True)
class StepMatmul:
    """One matmul of a micro batch and a rank."""

    weight: str
    """Such as ``mlp.linear_fc1``."""
    part: str
    """``forward``, ``input gradient`` or ``weight gradient``."""
    shape: MatmulShape
    count: int
    """In all layers of the model with this shape."""


def token_counts(config: RunConfig) -> list[int]:
    """Tokens of micro batches on a context-parallel rank: each of ``data.length_buckets``, else the most there can be.

    Pairs count as two sequences.
    """
    parallel = config.parallel
    samples = config.train.micro_batch_size * recipe_of(config).samples_per_sequence
    longest = samples * config.data.seq_length
    lengths = config.data.length_buckets or (longest + -longest % parallel.length_multiple,)
    return [length // parallel.cp for length in lengths]


def step_matmuls(
    plan: ModelPlan, config: RunConfig, precision: str, platform: Platform, tokens: Sequence[int]
) -> list[StepMatmul]:
    """The matmuls of linear layers and of the output projection, for micro batches of each length.

    Not included: routed experts, whose rows differ in each micro batch, FP8 layers, adapters and attention.
    """
    layout = first_layout(plan)
    counts, trained = Counter[tuple[str, int, int, bool]](), dict[tuple[str, int, int, bool], bool]()
    multiple = width_multiple(named_scaling(config.train.fp8_scaling))
    for name, placement in hidden_matrices(plan.family, plan.architecture).items():
        if placement.rule.is_expert or _WITHIN_MIXER.search(name):
            continue
        rows, columns = local_shape(placement.rule, plan.architecture, layout)
        fits_fp8 = rows % multiple == columns % multiple == 0
        is_split = placement.rule.shard == "whole" and plan.parallel.sequence_parallel
        if precision != "fp8" or not fits_fp8 or placement.rule.shard == "whole":
            key = _LAYER.sub("", name).removesuffix(".weight"), rows, columns, is_split
            counts[key] += 1
            trained[key] = trained.get(key, False) or name not in plan.frozen
    matmuls = []
    for length in tokens:
        for (weight, rows, columns, is_split), count in counts.items():
            part = length // plan.parallel.tp if is_split else length
            is_trained = trained[weight, rows, columns, is_split]
            shapes = _weight_matmuls(part, rows, columns, DTYPES[precision], trained=is_trained)
            matmuls += [StepMatmul(weight, name, shape, count) for name, shape in shapes.items()]
        matmuls += _output_matmuls(plan, precision, platform, length)
    return matmuls


def first_layout(plan: ModelPlan) -> Layout:
    """Layout of the first tensor-parallel rank; all have tensors of the same sizes."""
    parallel = plan.parallel
    return Layout(tp_size=parallel.tp, etp_size=parallel.expert_tp, padded_vocab_size=plan.padded_vocab_size)


def _output_matmuls(plan: ModelPlan, precision: str, platform: Platform, length: int) -> list[StepMatmul]:
    """If every token is a loss token; with fewer, as for MTP layers, chunks are shorter."""
    arch = plan.architecture
    if arch.head.score_head:
        return []
    rows = plan.padded_vocab_size // plan.parallel.tp
    device = torch.device(platform.device_type)
    implementation = cross_entropy_cpu if platform.device_type == "cpu" else cross_entropy_gpu
    chunks = Counter(end - start for start, end in chunk_bounds(length, rows, implementation.chunk_elements(device)))
    name = "embedding.word_embeddings.weight" if arch.head.tie_embeddings else f"{OUTPUT}.weight"
    return [
        StepMatmul(OUTPUT, part, shape, count)
        for chunk, count in chunks.items()
        for part, shape in _weight_matmuls(
            chunk, rows, arch.hidden_size, DTYPES[precision], trained=name not in plan.frozen
        ).items()
    ]


def _weight_matmuls(
    tokens: int, rows: int, columns: int, dtype: torch.dtype, *, trained: bool
) -> dict[str, MatmulShape]:
    """The matmuls of a weight [rows, columns] by part of the step."""
    shapes = {
        "forward": MatmulShape("matmul", tokens, columns, rows, True, dtype),
        "input gradient": MatmulShape("matmul", tokens, rows, columns, False, dtype),
    }
    if trained:
        shapes["weight gradient"] = MatmulShape("add_matmul", rows, tokens, columns, False, dtype)
    return shapes


def check_tuning(config: RunConfig, platform: Platform, *, for_tunable_op: bool) -> None:
    """Refuse layouts whose matmuls the choices cannot reach."""
    if config.parallel.async_tp:
        raise UsageError(
            "tune.file chooses for whole matmuls, and parallel.async_tp=true splits them. Leave one of them out."
        )
    if config.parallel.fsdp and not for_tunable_op:
        raise UsageError(
            "tune.file chooses libraries for the linear layers of Isthmus, and with parallel.fsdp those of "
            "Megatron-Core compute gradients. Leave one of them out."
        )
    if config.train.deterministic and platform.device_type == "cuda":
        raise UsageError(
            "tune.file may select GPU kernels that add in another order in each run, so train.deterministic=true does "
            "not hold. Leave one of them out."
        )


def tuning_messages(config: RunConfig, plan: ModelPlan, platform: Platform, precision: str) -> tuple[str, ...]:
    """Check ``tune.file`` against this run and machine; lines for the log.

    Raises:
        MissingInput: it does not exist.
        DataError: it is no such file.
        UsageError: it is for another device, other versions, another model or layout, or for another platform.
    """
    if config.tune.file is None:
        return ()
    path = tune_path(config.tune.file, platform)
    tuned = read_tuned(path)
    if tuned.for_tunable_op != (platform.name == "rocm"):
        kind = "of TunableOp, for AMD GPUs" if tuned.for_tunable_op else "for CPUs or NVIDIA GPUs"
        raise UsageError(f"tune.file={path} is {kind}, and this run is on {platform.name}. Leave tune.file out.")
    check_tuning(config, platform, for_tunable_op=tuned.for_tunable_op)
    if not tuned.for_tunable_op:
        check_made_for(path, tuned.made_for, made_for(platform))
    matmuls = step_matmuls(plan, config, precision, platform, token_counts(config))
    known = [known_matmul for known_matmul in matmuls if tuned.covers(known_matmul.shape)]
    if not known:
        raise UsageError(
            f"tune.file={path} has none of the {len(matmuls)} matmuls of this run, so it is for another model, layout, "
            "precision or length. Run isthmus tune with the settings of this run, or leave tune.file out."
        )
    share = math.fsum(known_matmul.shape.flops * known_matmul.count for known_matmul in known) / sum(
        m.shape.flops * m.count for m in matmuls
    )
    return (f"tune.file: {len(known)} of {len(matmuls)} matmuls of this run were measured, {share:.0%} of their FLOPs",)
