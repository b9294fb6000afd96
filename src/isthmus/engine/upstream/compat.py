"""Workarounds for upstream defects, one function each: the defect, the affected versions, the workaround.

Each has a test in tests/unit/engine/upstream/test_compat.py that fails once upstream is fixed, so it can go.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch


def cpu_random_state() -> None:
    """megatron-core 0.16: the random-state tracker sets the CUDA state through ``torch.cuda._lazy_call``.

    On a CPU build that call is queued until CUDA is initialized, which never happens, so forking a random stream, as
    sequence parallelism does, would not change the state. The setter is replaced by that of the CPU's generator.
    """
    from megatron.core.tensor_parallel import random

    module: Any = random
    module._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)


def quiet_missing_extensions() -> None:
    """megatron-core 0.16 warns about each extension that Isthmus replaces (Apex, TransformerEngine), on import."""
    warnings.filterwarnings("ignore", module=r"megatron\..*")
    # megatron-core 0.16 calls collectives by names that torch 2.13 has renamed, and saves ShardedTensors.
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"`torch\.distributed\.")
    warnings.filterwarnings("ignore", category=FutureWarning, message=r"Please use DTensor instead")
    warnings.filterwarnings("ignore", message=r".*(Apex|Transformer Engine|TransformerEngine).*")
    logging.getLogger("megatron").setLevel(logging.ERROR)


def clip_in_place() -> None:
    """megatron-core 0.16 without Apex: clipping copies every gradient, and the norm waits for the device per tensor."""
    from megatron.core.optimizer import clip_grads

    def norm(_chunk: int, _overflow: Any, lists: list[list[torch.Tensor]], *_per_tensor: bool) -> tuple[Any, None]:
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(lists[0]))).view(1), None

    def scale(_chunk: int, _overflow: Any, lists: list[list[torch.Tensor]], factor: Any) -> None:
        torch._foreach_mul_(lists[0], factor)

    module: Any = clip_grads
    module.l2_norm_impl, module.multi_tensor_scale_impl = norm, scale


def fill_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """megatron-core 0.16: DistributedOptimizer.state_dict fails before the first step of torch's AdamW.

    It reads the step count from the state, which torch fills in the first step; loading a checkpoint needs it earlier.
    The state that the first step would create is created here, with a count of zero.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device if group["fused"] else "cpu"),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }


def keep_bucket_padding(optimizer: Any) -> None:
    """megatron-core 0.16: DistributedOptimizer saves wrong state behind a padded bucket.

    It gathers the buckets without the padding between them and then slices the parameters at offsets that include it.
    A tied embedding has its own bucket, so with pp > 1 everything behind it on the last stage is shifted unless its
    size is a multiple of 128 (and of dp). Here the padding is restored before the parameters are sliced.
    (Upstream's comment: "This is a bug in the param ranges logic", its issue 504.)

    Args:
        optimizer: a ``DistributedOptimizer``; a second call changes nothing.
    """
    gather = type(optimizer).get_parameter_state_dp_zero

    def gather_padded(**how: Any) -> Any:
        state = gather(optimizer, **how)
        for number, buffer in enumerate(optimizer.buffers if state is not None else ()):
            for tensors in state[number].values():
                for name in [name for name, value in tensors.items() if isinstance(value, torch.Tensor)]:
                    padded = torch.zeros(buffer.numel, dtype=torch.float32)
                    parts = tensors[name].split([bucket.numel_unpadded for bucket in buffer.buckets])
                    for bucket, part in zip(buffer.buckets, parts, strict=True):
                        padded[bucket.offset : bucket.offset + part.numel()] = part
                    tensors[name] = padded
        return state

    optimizer.get_parameter_state_dp_zero = gather_padded


def sync_loss_scales(optimizer: Any) -> None:
    """megatron-core 0.16: optimizers in a chain (of dense weights, of experts) lower their loss scales one by one.

    Each lowers its own when its gradients overflow, but the loss is multiplied by the first one's scale, so the others
    would then divide by the wrong number. Here all get the state of the lowest.

    Args:
        optimizer: a ``ChainedOptimizer`` after a step; another optimizer is left unchanged.
    """
    chain = [each.grad_scaler for each in getattr(optimizer, "chained_optimizers", ())]
    scalers = [scaler for scaler in chain if scaler is not None]
    if len(scalers) > 1:
        lowest = min(
            (scaler.state_dict() for scaler in scalers), key=lambda s: (float(s["scale"]), s["growth_tracker"])
        )
        for scaler in scalers:
            scaler.load_state_dict(lowest)


def load_adam(optimizer: Any, tensors: dict[Any, Any], *, steps: int) -> None:
    """megatron-core 0.16: DistributedOptimizer cannot load what it saved of torch's AdamW.

    It looks for ``step`` among the sharded tensors, which never contain it, and it gives all parameters one shared
    ``step`` tensor, to which AdamW would then add one per parameter. Here the counts are removed while the tensors are
    loaded, and each parameter gets its own. Learning rates, decay, ``betas`` and ``eps`` stay as configured now.

    Args:
        optimizer: a ``DistributedOptimizer`` around torch's AdamW, with a filled state.
        tensors: its ``param_state`` as ``dist_checkpointing.load`` returns it.
        steps: the number of updates it had done.
    """
    counts = {parameter: state.pop("step") for parameter, state in optimizer.optimizer.state.items()}
    optimizer.load_parameter_state_from_fully_reshardable(tensors)
    for parameter, count in counts.items():
        optimizer.optimizer.state[parameter]["step"] = torch.full_like(count, steps)
