"""Checkpoint state of a fully sharded model: each rank's rows, under layout-independent names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from isthmus.engine.parallel.fsdp import FullyShardedDataParallel
from isthmus.engine.parallel.sharded_params import local_rows


def sharded_state(model: FullyShardedDataParallel, adam: Any, *, is_loading: bool) -> dict[str, Any]:
    """This rank's rows of weights and optimizer state, named as by Megatron-Core's ``DistributedOptimizer``."""
    weights: dict[str, Any] = {}
    moments: dict[str, Any] = {}
    for name, parameter in model.module.named_parameters():
        whole, rows = model.sharded_tensors[name], local_rows(parameter)
        local = parameter.detach().to_local()
        if not (is_loading and parameter.requires_grad):
            kept = local if is_loading else local.to(whole.data.dtype)
            weights |= {f"{name}.{n}": part for n, part in enumerate(_parts(whole, kept, rows))}
        if not parameter.requires_grad:
            continue
        states = {"param": local} | {key: adam.state[parameter][key].to_local() for key in ("exp_avg", "exp_avg_sq")}
        for state, tensor in states.items():
            entry = replace(whole, key=f"optimizer.state.{state}.{whole.key}")
            moments |= {f"{state}.{name}.{n}": part for n, part in enumerate(_parts(entry, tensor, rows))}
    weights |= {name: entry for name, entry in model.sharded_tensors.items() if not _is_tensor(entry)}
    groups = [dict(group) for group in adam.param_groups]
    for group in groups:
        group["step"] = float(next(iter(adam.state.values()))["step"])
        del group["params"]
    return {
        "model": weights,
        "optimizer": {
            "optimizer": {"param_groups": groups},
            "param_state": moments,
            "param_state_sharding_type": "fully_reshardable",
        },
    }


def set_num_updates(adam: Any, steps: int) -> None:
    """Loading a checkpoint sets all other tensors in place."""
    for state in adam.state.values():
        state["step"].fill_(steps)


def _is_tensor(entry: Any) -> bool:
    return isinstance(entry, ShardedTensor | ShardedTensorFactory)


def _parts(
    entry: ShardedTensor | ShardedTensorFactory, local: Tensor, rows: tuple[int, int]
) -> Iterator[ShardedTensor]:
    """Rows [start, end) of a parameter (``local``) as checkpoint entries; ``entry`` is the whole parameter's."""
    pieces = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
    for piece in pieces:
        # A piece is a view of rows of the parameter; its storage offset gives the first row.
        first = piece.data.storage_offset() // max(1, piece.data[0].numel())
        start, end = max(first, rows[0]), min(first + piece.data.shape[0], rows[1])
        if start >= end:
            continue
        own = local[start - rows[0] : end - rows[0]]
        own = own.view((1,) * piece.prepend_axis_num + own.shape)
        offset = list(piece.global_offset)
        offset[piece.prepend_axis_num] += start - first
        yield replace(
            piece,
            data=own,
            dtype=own.dtype,
            local_shape=tuple(own.shape),
            global_offset=tuple(offset),
            axis_fragmentations=None,  # ranks may have different numbers of rows
            replica_id=(*piece.replica_id[:-1], 0),  # each dp rank has different rows
            prepend_axis_num=0,
        )
