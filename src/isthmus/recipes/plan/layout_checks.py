"""Checks of the parallel layout against the model; each UsageError names possible values."""

from __future__ import annotations

import torch

from isthmus.config.schema import MoeConfig, OptimConfig, ParallelConfig, RolloutConfig, RunConfig, TrainConfig
from isthmus.data.batching.batches import check_batch_sizes
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.rules.shard import check_expert_sizes, check_tp_size
from isthmus.platforms.torch_features import fsdp_sums_gradients


def check_layout(architecture: Architecture, parallel: ParallelConfig) -> None:
    check_tp_size(architecture, parallel.tp)
    experts_differ = parallel.ep > 1 or parallel.expert_tp != parallel.tp
    if architecture.moe is not None:
        check_expert_sizes(architecture, ep_size=parallel.ep, etp_size=parallel.expert_tp)
    elif experts_differ:
        raise UsageError(
            f"parallel.ep={parallel.ep} and parallel.etp={parallel.etp} are for MoE models, and this model has no "
            f"experts ({architecture.family}). Leave them out."
        )
    if experts_differ and parallel.tp > 1 and not parallel.sequence_parallel:
        raise UsageError(
            f"parallel.ep={parallel.ep} and parallel.etp={parallel.expert_tp} with parallel.tp={parallel.tp} need "
            "parallel.sp=true: each rank dispatches its own tokens to the experts. Set it."
        )
    if architecture.setting("indexer") is not None and parallel.cp > 1:
        raise UsageError(
            f"parallel.cp={parallel.cp}: the keys of a query are selected on one rank ({architecture.family}). Leave "
            "parallel.cp out, and use parallel.tp for long samples."
        )
    others = sorted({mixer for mixers in architecture.pattern.mixers for mixer in mixers} - {"attention"})
    if others and parallel.cp > 1:
        raise UsageError(
            f"parallel.cp={parallel.cp} splits samples, and the state of {' and '.join(others)} layers passes from one "
            f"token to the next ({architecture.family}). Leave parallel.cp out; parallel.tp and train.recompute=full "
            "also reduce the memory of long samples."
        )
    check_stages(architecture, parallel.pp, parallel.vpp)
    without_mtp = {"parallel.cp": parallel.cp > 1, "parallel.fsdp": parallel.fsdp}
    unsupported = next((name for name, used in without_mtp.items() if used), None)
    if architecture.pattern.mtp_layers and unsupported is not None:
        raise UsageError(
            f"MTP layers (num_nextn_predict_layers={architecture.pattern.mtp_layers}) cannot be trained with "
            f"{unsupported} ({architecture.family}). Leave it out, or remove the tensors of these layers from the "
            "folder."
        )
    if parallel.fsdp:
        check_fsdp(parallel)


def check_experts(architecture: Architecture, moe: MoeConfig, *, fp8: bool = False) -> None:
    """Check that the model has the experts and the expert bias that ``moe`` settings and ``train.fp8_experts`` need."""
    if architecture.moe is None and fp8:
        raise UsageError(
            f"train.fp8_experts=true is for MoE models, and this model has no experts ({architecture.family}). Leave "
            "it out."
        )
    if architecture.moe is None and moe != MoeConfig():
        settings = ", ".join(f"moe.{name}" for name in sorted(moe.model_fields_set)) or "moe"
        raise UsageError(
            f"{settings} is for MoE models, and this model has no experts ({architecture.family}). Leave it out."
        )
    if moe.expert_bias_update_rate and not (architecture.moe is not None and architecture.moe.expert_bias):
        raise UsageError(
            f"moe.expert_bias_update_rate={moe.expert_bias_update_rate:g} updates the router's expert bias, and "
            f"{architecture.family} has none. Use moe.aux_loss to balance its experts."
        )


def check_fsdp(parallel: ParallelConfig) -> None:
    if parallel.pp > 1:
        raise UsageError(
            f"parallel.fsdp with parallel.pp={parallel.pp}: a stage would gather its weights for every micro "
            "batch. Set parallel.pp=1, or leave parallel.fsdp out."
        )
    if parallel.ep > 1 or parallel.expert_tp != parallel.tp:
        raise UsageError(
            f"parallel.fsdp with parallel.ep={parallel.ep} and parallel.etp={parallel.expert_tp}: fsdp shards "
            "weights over the data parallel ranks, which already have different experts. Set parallel.ep=1 and leave "
            "parallel.etp out, or leave parallel.fsdp out."
        )


def check_fsdp_torch(parallel: ParallelConfig) -> None:
    if parallel.fsdp and not fsdp_sums_gradients():
        raise UsageError(
            f"parallel.fsdp: fully_shard of torch {torch.__version__} averages gradients, and token-weighted "
            "losses need their sum. Use torch 2.10 or newer, or leave parallel.fsdp out."
        )


def check_batch_invariant(config: RunConfig, device_type: str, precision: str) -> None:
    """Refuse ``train.batch_invariant`` on a CPU, and beside settings that select other kernels of matmuls."""
    if not config.train.batch_invariant:
        return
    if device_type == "cpu":
        raise UsageError(
            "train.batch_invariant=true is for GPUs, and this run is on a CPU, where float32 matmuls of different "
            "shapes differ by about 1e-6. Leave it out."
        )
    if precision == "fp32":
        raise UsageError(
            "train.batch_invariant=true: the kernels multiply float32 in TF32, which has fewer digits. Leave it out, "
            "or use train.precision=bf16."
        )
    others = {
        "train.precision=fp8": precision == "fp8",
        "train.gemm_tuning=true": config.train.gemm_tuning,
        "tune.file": config.tune.file is not None,
        "parallel.async_tp=true": config.parallel.async_tp,
    }
    if chosen := [name for name, is_set in others.items() if is_set]:
        raise UsageError(
            f"train.batch_invariant=true selects kernels of matmuls, and so does {chosen[0]}. Leave one of them out."
        )


def check_fsdp_precision(parallel: ParallelConfig, precision: str) -> None:
    """fsdp does not support fp16 and fp8, which scale the loss or the weights."""
    if parallel.fsdp and precision not in ("fp32", "bf16"):
        raise UsageError(
            f"parallel.fsdp with train.precision={precision}: sharded weights are float32 and are gathered as "
            "fp32 or bf16. Set train.precision to one of these, or leave parallel.fsdp out."
        )


def check_async_layout(parallel: ParallelConfig, device_type: str, precision: str, *, ranks_here: int) -> None:
    """Check that matmuls of tensor-parallel layers can overlap their communication with ``parallel.async_tp``."""
    reasons = {
        f"parallel.tp={parallel.tp} has no communication": parallel.tp == 1,
        "parallel.sp=false has no gathers to overlap": not parallel.sequence_parallel,
        "parallel.fsdp has no float32 gradient buffers": parallel.fsdp,
        "train.precision=fp8 layers quantize whole matrices": precision == "fp8",
        "it is for GPUs": device_type == "cpu",
        f"the ranks of a tensor-parallel group must be on one machine, which has {ranks_here}": parallel.tp
        > ranks_here,
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if parallel.async_tp and reason is not None:
        raise UsageError(f"parallel.async_tp=true: {reason}. Leave parallel.async_tp out.")


def check_stages(architecture: Architecture, pp: int, vpp: int = 1) -> None:
    """Check that every pipeline stage has a layer and, with virtual stages, all have the same number."""
    layers = architecture.num_layers
    if pp > 1 and (architecture.pattern.key_sharing_layers or architecture.embedding.layer_input_size):
        what = (
            "layers attend to keys of other layers"
            if architecture.pattern.key_sharing_layers
            else "layers have own inputs"
        )
        raise UsageError(f"pp={pp} is not supported for this model, whose {what} ({architecture.family}). Use pp=1.")
    if pp > layers:
        hint = f"{layers} or less" if layers > 1 else "1"
        raise UsageError(f"pp={pp} is more than the {layers} layers ({architecture.family}). Use {hint}.")
    if vpp > 1 and layers % (pp * vpp):
        fitting = [str(n) for n in range(2, layers // pp + 1) if layers % (pp * n) == 0]
        hint = f"Use vpp={' or '.join(fitting)}, or leave it out" if fitting else "Leave vpp out"
        raise UsageError(
            f"pp={pp} x vpp={vpp} = {pp * vpp} stages do not divide num_layers={layers} ({architecture.family}). "
            f"{hint}."
        )


def check_offload(optim: OptimConfig, rollout: RolloutConfig, parallel: ParallelConfig, device_type: str) -> None:
    for name, is_set in (("optim.offload", optim.offload), ("rollout.offload", rollout.offload)):
        if is_set and device_type == "cpu":
            raise UsageError(
                f"{name}=true moves optimizer state out of GPU memory, and this run is on a CPU. Leave it out."
            )
    if optim.offload and parallel.fsdp:
        raise UsageError(
            "optim.offload=true is for the distributed optimizer, which parallel.fsdp does not use. Leave one out."
        )


def check_micro_batches(train: TrainConfig, parallel: ParallelConfig, world_size: int) -> None:
    """Check that ranks, and the interleaved pipeline schedule (arXiv 2104.04473), can divide the batch."""
    check_batch_sizes(train.global_batch_size, train.micro_batch_size, parallel.dp(world_size))
    if parallel.vpp == 1:
        return
    dp = parallel.dp(world_size)
    multiple = train.micro_batch_size * dp * parallel.pp
    if train.global_batch_size % multiple:
        below = train.global_batch_size // multiple * multiple
        near = " or ".join(str(size) for size in (below, below + multiple) if size)
        raise UsageError(
            f"train.global_batch_size={train.global_batch_size} is not a multiple of micro_batch_size="
            f"{train.micro_batch_size} x data-parallel ranks={dp} x pp={parallel.pp}, as parallel.vpp={parallel.vpp} "
            f"requires. Use {near}, or leave parallel.vpp out."
        )
