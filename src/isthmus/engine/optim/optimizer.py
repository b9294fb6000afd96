"""AdamW and Muon on Megatron-Core's distributed optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from isthmus.config.schema.optim import OptimConfig
from isthmus.config.schema.train import TrainConfig
from isthmus.engine.decoder.decoder import Decoder
from isthmus.engine.linear.quantized_weight import QuantizedWeight
from isthmus.engine.optim.adamw import AdamW8bit, AdamWBesideMuon, CpuOffloadAdamW, create_state
from isthmus.engine.optim.muon import Muon, Shard
from isthmus.engine.optim.param_groups import group_overrides, mark_parameters
from isthmus.engine.parallel.ddp import OverlappingDataParallel
from isthmus.engine.parallel.fsdp import FullyShardedDataParallel
from isthmus.engine.parallel.live_parameters import live_parameters
from isthmus.engine.parallel.sharded_params import elements_before, local_elements
from isthmus.engine.upstream.compat import use_torch_adam
from isthmus.families.family import Family
from isthmus.families.matched_tensors import hidden_matrices

_DEFAULT_TRAIN = TrainConfig()
_CLASSES: dict[str, type[AdamW8bit | AdamWBesideMuon]] = {"adamw_8bit": AdamW8bit, "muon": AdamWBesideMuon}
MIN_LOSS_SCALE = 1.0
"""If a float16 gradient overflows at this scale, the run has diverged."""


def wrap_data_parallel(
    model: Decoder,
    *,
    overlap_grad_reduce: bool = False,
    overlap_param_gather: bool = False,
    bucket_elements: int | None = None,
) -> DistributedDataParallel:
    """Move the parameters into flat buffers with float32 gradients; the optimizer shards them over dp.

    ``overlap_param_gather`` requires ``overlap_grad_reduce``. ``bucket_elements`` None is Megatron-Core's default, at
    least 40 million.
    """
    alone = parallel_state.get_data_parallel_world_size(with_context_parallel=True) == 1
    overlap_grad_reduce = overlap_grad_reduce and not alone
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap_grad_reduce,
        overlap_param_gather=overlap_param_gather and not alone,
        bucket_size=None if alone else bucket_elements,
    )
    wrapped = OverlappingDataParallel(config=model.config, ddp_config=ddp, module=model)
    if overlap_grad_reduce:
        # Gradients are complete after the last micro batch; Megatron-Core needs a list if there are several stages.
        others = model.config.no_sync_func
        others = [] if others is None else others if isinstance(others, list) else [others]
        model.config.no_sync_func = [*others, wrapped.no_sync] if others else wrapped.no_sync
    # With one rank, gloo would copy all gradients and weights onto themselves.
    idle = wrapped.bucket_groups if alone else []
    if parallel_state.get_expert_data_parallel_world_size() == 1 and not overlap_grad_reduce:
        idle = [*idle, *wrapped.expert_parallel_bucket_groups]
    for buckets in idle:
        buckets.start_grad_sync = buckets.start_param_sync = lambda **_kwargs: None
    return wrapped


WrappedModel: TypeAlias = DistributedDataParallel | FullyShardedDataParallel


def build_optimizer(
    model: Sequence[WrappedModel],
    optim: OptimConfig,
    train: TrainConfig = _DEFAULT_TRAIN,
    *,
    family: Family | None = None,
) -> MegatronOptimizer:
    """AdamW or Muon over this rank's shard of the parameters, with float32 main weights for a 16-bit model.

    Call it after loading the weights: it copies them to the main weights. With FSDP the shards are float32 and are
    updated in place. ``family`` is needed for Muon and for settings with patterns of tensor names. Raises UsageError if
    such a pattern does not fit the model.
    """
    use_torch_adam()
    if family is not None:
        mark_parameters(model, optim, family)
    by_rows = isinstance(model[0], FullyShardedDataParallel)
    dtype = torch.float32 if by_rows else model[0].config.params_dtype
    settings = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        min_lr=optim.min_lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.beta1,
        adam_beta2=optim.beta2,
        adam_eps=optim.eps,
        clip_grad=optim.clip_grad,
        bf16=dtype == torch.bfloat16,
        fp16=dtype == torch.float16,
        initial_loss_scale=train.initial_loss_scale,
        min_loss_scale=MIN_LOSS_SCALE,
        loss_scale_window=train.loss_scale_window,
        hysteresis=1,  # each overflow costs a step, so the first one counts
        params_dtype=dtype,
        use_distributed_optimizer=not by_rows,
        overlap_param_gather=model[0].ddp_config.overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(
        settings,
        list(model),
        use_gloo_process_groups=False,
        **group_overrides(model, optim, settings),
    )
    for part in distributed_optimizers(optimizer):
        for group in part.optimizer.param_groups:
            group["fused"], group["foreach"] = True, False  # one pass over memory instead of about ten
        if optim.offload:
            part.optimizer = CpuOffloadAdamW.from_adamw(part.optimizer)
        if optim.optimizer in _CLASSES:
            part.optimizer = _CLASSES[optim.optimizer].from_adamw(part.optimizer)
        create_state(part.optimizer)
    if optim.optimizer == "muon":
        # update_weights steps it: the optimizers of the chain are not the same on all ranks of a stage.
        stepped: Any = optimizer
        stepped.muon = _muon(model, optimizer, optim, family)
    return optimizer


def _muon(
    model: Sequence[WrappedModel], optimizer: MegatronOptimizer, optim: OptimConfig, family: Family | None
) -> Muon:
    assert family is not None
    decoder: Any = model[0].module
    names = {parameter: name for name, parameter in live_parameters(list(model)).items()}
    shards: dict[str, Shard] = {}
    for part in distributed_optimizers(optimizer):
        groups = {main: group for group in part.optimizer.param_groups for main in group["params"] if group.get("muon")}
        for parameter, main, start in local_shards(part):
            if main in groups:
                momentum = local_elements(part.optimizer.state[main]["momentum_buffer"])
                shards[names[parameter]] = Shard(main, momentum, start, groups[main])
    rules = {name: placement.rule for name, placement in hidden_matrices(family, decoder.architecture).items()}
    return Muon(shards, rules, decoder.architecture, optim, decoder.config.device)


def chain(optimizer: MegatronOptimizer) -> list[Any]:
    """Optimizers of Megatron-Core's chain; experts may have their own."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def distributed_optimizers(optimizer: MegatronOptimizer) -> list[Any]:
    """Optimizers of the chain with parameters on this rank."""
    return [part for part in chain(optimizer) if getattr(part, "buffers", True)]  # FSDP's optimizer has no buffers


def local_shards(optimizer: Any) -> Iterator[tuple[nn.Parameter, Tensor, int]]:
    """The model's parameters of an optimizer of the chain: parameter, main weights of this rank, elements before."""
    if not hasattr(optimizer, "buffers"):  # FSDP
        for parameter in optimizer.get_parameters():
            yield parameter, parameter, elements_before(parameter)
        return
    # The indices of model_param_group_index_map do not apply to groups with parameters of several dtypes.
    models = zip(optimizer.model_fp32_groups, optimizer.model_float16_groups, strict=True)
    for (in_float32, in_16_bits), group in zip(models, optimizer.optimizer.param_groups, strict=True):
        for parameter, main in zip([*in_float32, *in_16_bits], group["params"], strict=True):
            yield parameter, main, optimizer._get_model_param_range_map(parameter)["param"].start


def torch_optimizers(optimizer: MegatronOptimizer) -> list[torch.optim.Optimizer]:
    return [part.optimizer for part in distributed_optimizers(optimizer)]


def memory_stats(stages: Sequence[Any], optimizer: Any) -> dict[str, int]:
    """Bytes that a rank keeps between steps. Shared memory counts once, in the first category that has it."""
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    elements = [
        tensor
        for parameter in parameters
        for tensor in (parameter.elements if isinstance(parameter, QuantizedWeight) else (parameter,))
    ]
    inner = [part.optimizer for part in chain(optimizer)]
    groups = [group["params"] for part in inner if part is not None for group in part.param_groups]
    entries = [value for part in inner if part is not None for entry in part.state.values() for value in entry.values()]
    states = [value for value in entries if isinstance(value, Tensor)]
    seen: set[int] = set()
    gradients = (getattr(parameter, "main_grad", parameter.grad) for parameter in parameters)
    return {
        "weights": _bytes(elements, seen),
        "gradients": _bytes((gradient for gradient in gradients if gradient is not None), seen),
        "optimizer state": _bytes([*itertools.chain(*groups), *states], seen),
    }


def _bytes(tensors: Iterable[Tensor], seen: set[int]) -> int:
    total = 0
    for tensor in tensors:
        storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total
