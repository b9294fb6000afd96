"""Tasks: what a traced rank writes into a checkpoint, and where the parameters of a stage are in its buffers."""

from __future__ import annotations

from typing import Any

import torch


def stage_layout(*, preset: str, stage: int, tp: int, pp: int, dp: int, fsdp: int = 0) -> list[dict[str, Any]]:
    """Parameters of a pipeline stage on its first rank: place in a bucket, and the pieces of their checkpoint entry.

    With ``fsdp``, the number of rows in place of the bucket.
    """
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    from fake_cuda.world import build
    from isthmus.engine.checkpoint.optimizer_state import is_tensor
    from isthmus.engine.checkpoint.run_state import sharding_metadata

    rank = build(f"preset:{preset}", rank=stage * tp * dp, size=tp * pp * dp, tp=tp, pp=pp, fsdp=fsdp or False)
    (wrapped,) = rank.model.stages
    if fsdp:
        return [
            {"rows": len(parameter), "elements": parameter.numel(), "pieces": _pieces(wrapped.sharded_tensors[name])}
            for name, parameter in wrapped.module.named_parameters()
        ]
    state = wrapped.module.sharded_state_dict(metadata=sharding_metadata())
    entries = {entry.data: entry for entry in nested_values(state) if is_tensor(entry)}
    result = []
    for buffer in [*wrapped.buffers, *wrapped.expert_parallel_buffers]:
        for parameter, (start, end, number) in buffer.param_index_map.items():
            bucket = buffer.buckets[number]
            result.append(
                {
                    "bucket_elements": bucket.grad_data.numel(),
                    "start": start - bucket.offset,
                    "elements": end - start,
                    "pieces": _pieces(entries[parameter]),
                }
            )
    return result


def _pieces(entry: Any) -> list[dict[str, Any]]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    pieces = [*nested_values(entry.build())] if isinstance(entry, ShardedTensorFactory) else [entry]
    described = []
    for piece in pieces:
        ahead = piece.prepend_axis_num
        shape, full = list(piece.data.shape), list(piece.global_shape[ahead:])
        # The second part of a fused weight begins at the middle of the axis.
        split = [axis for axis in range(len(shape)) if shape[axis] * len(pieces) < full[axis]]
        described.append(
            {
                "key": piece.key,
                "first": piece.data.storage_offset() - entry.data.storage_offset(),
                "shape": shape,
                "full_shape": list(piece.global_shape),
                "offset": list(piece.global_offset),
                "tp_axis": split[0] + ahead if split else None,
            }
        )
    return described


def written_parts(*, preset: str, rank: int, tp: int, pp: int, dp: int, fsdp: int = 0) -> list[list[Any]]:
    """Key, offset and shape of each tensor that a rank writes, from the state that a save collects."""
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories, is_main_replica

    from fake_cuda.world import build
    from isthmus.engine.checkpoint.run_state import sharded_run_state
    from isthmus.engine.optim.optimizer import torch_optimizers

    built = build(f"preset:{preset}", rank=rank, size=tp * pp * dp, tp=tp, pp=pp, fsdp=fsdp or False)
    for optimizer in torch_optimizers(built.stepper.optimizer):
        for group in optimizer.param_groups:
            for main in group["params"]:
                optimizer.state[main] = {"exp_avg": torch.empty_like(main), "exp_avg_sq": torch.empty_like(main)}
    state = sharded_run_state(built.stepper, is_loading=False)
    apply_factories(state)
    entries = (entry for entry in nested_values(state) if isinstance(entry, ShardedTensor))
    return [
        [entry.key, list(entry.global_offset), [*(1,) * entry.prepend_axis_num, *entry.local_shape]]
        for entry in entries
        if is_main_replica(entry.replica_id)
    ]
