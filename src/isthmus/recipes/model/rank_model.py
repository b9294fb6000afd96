"""This rank's part of the model, with its weights."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from isthmus.config.schema import RunConfig
from isthmus.convert.online import import_weights
from isthmus.convert.weight_source import RandomWeights, WeightSource
from isthmus.engine.parallel.process_groups import Position, agree, gather_objects, open_groups
from isthmus.errors import UsageError
from isthmus.families.rules.shard import Layout
from isthmus.platforms.base import Platform
from isthmus.platforms.rank_env import local_rank, local_world_size
from isthmus.recipes.model.pissa import PISSA, PissaAdapters
from isthmus.recipes.plan.lora_plan import ExistingAdapters
from isthmus.recipes.plan.model_plan import ModelPlan

if TYPE_CHECKING:
    from isthmus.engine.attention.backends.selection import Selection
    from isthmus.engine.decoder_config import DecoderConfig
    from isthmus.engine.linear.fp8_linear import Fp8Recipe
    from isthmus.engine.lora.attach import AdapterSource

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}
"""Dtype of weights and activations by precision; fp8 applies to matmul inputs only."""


@dataclass(frozen=True, slots=True)
class RankModel:
    plan: ModelPlan
    position: Position
    dtype: torch.dtype
    stages: list[Any]
    """One decoder, or ``parallel.vpp`` decoders, or their data-parallel wrappers."""
    source: WeightSource
    """The initial weights."""
    messages: tuple[str, ...] = ()
    """Lines for the log."""
    pissa: PissaAdapters | None = None
    """The adapters that were subtracted from the weights."""

    @property
    def layout(self) -> Layout:
        """The slices of each tensor that this rank has."""
        return _layout(self.plan, self.position)


def _layout(plan: ModelPlan, position: Position) -> Layout:
    return Layout(
        tp_rank=position.tp_rank,
        tp_size=plan.parallel.tp,
        etp_rank=position.etp_rank,
        etp_size=plan.parallel.expert_tp,
        padded_vocab_size=plan.padded_vocab_size,
    )


def join_and_build(
    config: RunConfig, plan: ModelPlan, platform: Platform, precision: str, *, training: bool = True
) -> RankModel:
    position = open_groups(plan.parallel, platform, seed=config.train.seed, timeout_s=config.parallel.timeout_s)
    return build_rank_model(config, plan, platform, position, precision, training=training)


def build_rank_model(
    config: RunConfig, plan: ModelPlan, platform: Platform, position: Position, precision: str, *, training: bool = True
) -> RankModel:
    """Build this rank's stages and read their weights from the model folder.

    ``training`` adds gradient buffers for the distributed optimizer; ``parallel.fsdp`` shards weights and gradients in
    either case. Raises UsageError if the MTP layers have another embedding or output layer than the model, or if
    ``train.compile=true`` or the requested ``train.attention`` is not possible.
    """
    from isthmus.engine.decoder.model_config import transformer_config
    from isthmus.engine.lora.attach import InitialAdapters, adapter_tensors, load_adapters, subtract_adapters
    from isthmus.engine.moe.gemm_choice import choose_gemms
    from isthmus.engine.optim.optimizer import wrap_data_parallel
    from isthmus.engine.parallel.live_parameters import live_tensors, mtp_shared_tensors

    dtype = DTYPES[precision]
    device = torch.device(platform.device_type)
    fsdp = plan.parallel.fsdp
    attention = select_attention(config, plan, device, precision, verified=True)
    settings = transformer_config(
        plan.architecture,
        plan.parallel,
        dtype=dtype,
        device=device,
        train=config.train,
        moe=config.moe,
        mtp=True,
        dropout=plan.dropout,
        attention=attention.name,
        vocab_rows=plan.padded_vocab_size,
    )
    stages, quantization = _build_stages(config, plan, settings, position)
    modules = torch.nn.ModuleList(stages)
    messages = (*attention.messages, *quantization)
    messages += _choose_kernels(config, plan, platform, modules, precision, training=training)
    if training and not fsdp:
        stages = [wrap_data_parallel(stage, **_overlap(config, platform)) for stage in stages]
    if training and plan.architecture.moe is not None:
        tokens = config.train.micro_batch_size * config.data.seq_length // plan.parallel.cp
        messages += choose_gemms(modules, tokens * plan.architecture.moe.top_k, dtype)
    source, checked = _weight_source(config, plan)
    messages += checked
    model = RankModel(plan, position, dtype, stages, source, messages)
    import_weights(live_tensors(stages), plan.family, plan.architecture, source, layout=model.layout)
    if plan.adapters is not None:
        start: AdapterSource = InitialAdapters(config.lora.init, config.train.seed)
        if plan.existing is not None:
            start = ExistingAdapters(plan.existing)
        elif config.lora.init.startswith(PISSA):
            local_linears = {tensor.adapter.linear for tensor in adapter_tensors(stages)}
            start = pissa = PissaAdapters(config.lora.init, plan.adapters, source, local_linears, device)
            model = replace(model, pissa=pissa)
        load_adapters(stages, start)
        if model.pissa is not None:
            subtract_adapters(stages)
    if config.model.init != "random" and plan.architecture.pattern.mtp_layers:
        agree(lambda: _check_mtp_copies(model, mtp_shared_tensors(stages)))
    return model


def _build_stages(
    config: RunConfig, plan: ModelPlan, settings: DecoderConfig, position: Position
) -> tuple[list[Any], tuple[str, ...]]:
    """This rank's stages with their adapters, without values; and messages on quantized weights."""
    from isthmus.engine.decoder.decoder import build_sharded, build_stages
    from isthmus.engine.linear.quantized_linears import quantize_frozen, unallocated_linears
    from isthmus.engine.lora.attach import attach_adapters
    from isthmus.engine.parallel.live_parameters import freeze

    if plan.parallel.fsdp:
        often = plan.parallel.fsdp_reduce == "micro_batch"
        return [build_sharded(plan.architecture, settings, plan.frozen, reduces_each_micro_batch=often)], ()
    quantize = config.lora.quantize
    with nullcontext() if quantize is None else unallocated_linears():
        stages = build_stages(plan.architecture, settings)
    freeze(stages, plan.frozen)
    messages = () if quantize is None else quantize_frozen(stages, quantize, settings.device)
    if plan.adapters is not None:
        placements = plan.family.placements(plan.architecture)
        attach_adapters(stages, plan.adapters, placements, plan.architecture, _layout(plan, position))
    return stages, messages


def _choose_kernels(
    config: RunConfig, plan: ModelPlan, platform: Platform, modules: torch.nn.Module, precision: str, *, training: bool
) -> tuple[str, ...]:
    """Select compiled regions, FP8 and overlapped matmuls; returns messages."""
    from isthmus.engine.compiled import choose_compile, compile_failure
    from isthmus.engine.linear.batch_invariant import restore_matmuls, use_batch_invariant_matmuls
    from isthmus.engine.linear.fp8_linear import check_kernels
    from isthmus.engine.linear.linear import use_async_tp, use_fp8
    from isthmus.engine.linear.matmul import rounded_gradients, use_table
    from isthmus.engine.linear.tuned_matmuls import use_tuned
    from isthmus.engine.mixers.delta_kernels import choose_delta_kernels
    from isthmus.engine.mixers.mamba_kernels import choose_mamba_kernels
    from isthmus.engine.moe.fp8_experts import check_grouped_kernel, use_fp8_experts

    device = platform.device_type
    if precision == "fp8" and device != "cpu":
        # Before regions are compiled for the shapes of the run.
        agree(lambda: check_kernels(fp8_recipe(config, platform), torch.device(device)))
        if config.train.fp8_experts:
            agree(lambda: check_grouped_kernel(platform.fp8_types()[0], torch.device(device)))
    failure = next(filter(None, gather_objects(compile_failure(config.train.compile, device))), "")
    lines = [choose_compile(config.train.compile, device, failure), *choose_delta_kernels(modules)]
    lines += choose_mamba_kernels(modules)
    if training and not plan.parallel.fsdp:
        lines.append(rounded_gradients(device, DTYPES[precision]))
    use_table(None)  # of another run in this process
    restore_matmuls()
    if config.train.batch_invariant:
        agree(lambda: lines.append(use_batch_invariant_matmuls(torch.device(device))))
    if (file := config.tune.file) is not None:
        agree(lambda: lines.append(use_tuned(file, platform)))
    if precision == "fp8":
        lines += use_fp8(modules, fp8_recipe(config, platform))
        if config.train.fp8_experts:
            lines += use_fp8_experts(modules, platform.fp8_types()[0])
    if training and plan.parallel.async_tp:
        agree(lambda: use_async_tp(modules))
        lines.append("async tensor parallelism: on")
    return tuple(line for line in lines if line)


def select_attention(
    config: RunConfig, plan: ModelPlan, device: torch.device, precision: str, *, verified: bool
) -> Selection:
    """The attention backend; arguments and errors are those of :func:`select_backend`."""
    from isthmus.engine.attention.backends.selection import select_backend
    from isthmus.engine.decoder.model_config import attention_needs

    arch, parallel = plan.architecture, plan.parallel
    needs = attention_needs(arch, parallel, dtype=DTYPES[precision], device=device, dropout=plan.dropout)
    tokens = config.train.micro_batch_size * config.data.seq_length
    return select_backend(config.train.attention, *needs, verified=verified, tokens=tokens)


def _weight_source(config: RunConfig, plan: ModelPlan) -> tuple[WeightSource, tuple[str, ...]]:
    """The weights, and a line if they have published hashes; each rank of a machine checks some of the files."""
    if config.model.init == "random":
        return RandomWeights(plan.family, plan.architecture, config.train.seed), ()
    line = plan.source.check_published(share=local_rank(), shares=local_world_size())
    return plan.weights.source, () if line is None else (line,)


def _check_mtp_copies(model: RankModel, shared: dict[str, torch.Tensor]) -> None:
    """Check that tensors that MTP layers share with the model are equal in the files."""
    plan = model.plan
    placements = plan.family.placements(plan.architecture)
    read = {name: torch.empty_like(tensor) for name, tensor in shared.items() if name in placements}
    import_weights(read, plan.family, plan.architecture, plan.weights.source, layout=model.layout)
    for name, tensor in read.items():
        if not torch.equal(tensor, shared[name]):
            raise UsageError(
                f"{plan.weights.source}: {placements[name].hf[0]} differs from the model's own tensor, and MTP layers "
                "share that in training (arXiv 2412.19437). Remove the tensors of the MTP layers from the folder."
            )


def fp8_recipe(config: RunConfig, platform: Platform) -> Fp8Recipe:
    from isthmus.engine.linear.fp8_linear import Fp8Recipe
    from isthmus.engine.linear.fp8_quantization import named_scaling

    e4m3, e5m2 = platform.fp8_types()
    scaling = named_scaling(config.train.fp8_scaling, swizzled=platform.swizzled_mx_scales)
    return Fp8Recipe(scaling, e4m3, e5m2 if config.train.fp8_format == "hybrid" else e4m3)


def _overlap(config: RunConfig, platform: Platform) -> dict[str, Any]:
    """Default: on for GPUs, off for CPUs, whose cores do not communicate in parallel."""
    grads, weights = config.parallel.overlap_grad_reduce, config.parallel.overlap_param_gather
    grads = platform.device_type != "cpu" or bool(weights) if grads is None else grads
    return {"overlap_grad_reduce": grads, "overlap_param_gather": grads if weights is None else weights}
