"""Checkpoint state of the optimizer: each rank saves and loads its own elements, under layout-independent names.

Names and content are those of Megatron-Core's ``fully_reshardable`` format. Megatron-Core gathers the whole state, 12
bytes per parameter, on every data-parallel rank to write it (docs/decisions/0037).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor

from isthmus.engine.optim.optimizer import local_shards
from isthmus.engine.parallel.sharded_params import local_elements


def optimizer_state(
    adam: Any,
    shards: Iterator[tuple[ShardedTensor | ShardedTensorFactory, Tensor, int]],
    *,
    stacked: bool,
    copy: int = 0,
) -> dict[str, Any]:
    """State of ``adam``; loading it sets the tensors in place.

    ``shards`` has for each parameter the checkpoint entry of the whole parameter, the part of it that ``adam`` updates,
    and the number of elements before this part. ``stacked`` and ``copy``: see :func:`local_entries`.
    """
    elements: dict[str, ShardedTensor] = {}
    for number, (entry, main, start) in enumerate(shards):
        for state, tensor in {"param": main, **adam.state[main]}.items():
            if state == "step":
                continue
            state_entry = replace(entry, key=f"optimizer.state.{state}.{entry.key}")
            parts = local_entries(state_entry, local_elements(tensor), start, stacked=stacked, copy=copy)
            elements |= {f"{number}.{state}.{n}": part for n, part in enumerate(parts)}
    groups = [dict(group) for group in adam.param_groups]
    for group in groups:
        group["step"] = float(next((state["step"] for state in adam.state.values() if "step" in state), 0))
        del group["params"]
    return {
        "optimizer": {"param_groups": groups},
        "param_state": elements,
        "param_state_sharding_type": "fully_reshardable",
    }


def set_num_updates(adam: Any, steps: int) -> None:
    """Loading a checkpoint sets all other tensors in place."""
    for state in adam.state.values():
        if "step" in state:  # not of Muon
            state["step"].fill_(steps)


def distributed_state(optimizer: Any, model_state: dict[str, Any], *, stacked: bool) -> dict[str, Any]:
    """State of a Megatron-Core ``DistributedOptimizer``; ``model_state`` has the entries of its model's parameters."""
    entries = {entry.data: entry for entry in nested_values(model_state) if is_tensor(entry)}

    def shards() -> Iterator[tuple[ShardedTensor | ShardedTensorFactory, Tensor, int]]:
        for parameter, main, start in local_shards(optimizer):
            yield entries[parameter], main, start

    return optimizer_state(optimizer.optimizer, shards(), stacked=stacked) | grad_scaler_state(optimizer)


def grad_scaler_state(optimizer: Any) -> dict[str, Any]:
    """Empty unless the model is float16."""
    return {} if optimizer.grad_scaler is None else {"grad_scaler": optimizer.grad_scaler.state_dict()}


def is_tensor(entry: Any) -> bool:
    return isinstance(entry, ShardedTensor | ShardedTensorFactory)


def local_entries(
    entry: ShardedTensor | ShardedTensorFactory, local: Tensor, start: int, *, stacked: bool = True, copy: int = 0
) -> Iterator[ShardedTensor]:
    """Elements ``local`` [n] of a parameter from ``start`` as checkpoint entries; ``entry`` is the whole parameter's.

    Each data-parallel rank has other elements, or with HSDP each rank of a ``copy``, of which the first is saved.
    Entries of layers or experts are parts of one stacked tensor, or tensors of their own if they are not ``stacked``: a
    checkpoint has only complete tensors, and some layers may be frozen.
    """
    pieces = nested_values(entry.build()) if isinstance(entry, ShardedTensorFactory) else [entry]
    for piece in pieces:
        # A piece is a view of rows of the parameter.
        first = piece.data.storage_offset() - entry.data.storage_offset()
        low, high = max(first, start), min(first + piece.data.numel(), start + local.numel())
        rest = local[low - start :]
        for corner, size in blocks(piece.data.shape, low - first, high - first):
            block, rest = rest[: math.prod(size)], rest[math.prod(size) :]
            ahead = piece.prepend_axis_num
            number, offset = piece.global_offset[:ahead], piece.global_offset[ahead:]
            axes = ahead if stacked else 0
            shape = (1,) * axes + size
            yield replace(
                piece,
                key=piece.key if stacked else ".".join([piece.key, *map(str, number)]),
                data=block.view(shape),
                dtype=local.dtype,
                local_shape=shape,
                global_shape=piece.global_shape[ahead - axes :],
                global_offset=number[:axes] + tuple(map(sum, zip(offset, corner, strict=True))),
                axis_fragmentations=None,  # blocks have different sizes
                replica_id=(*piece.replica_id[:-1], copy),
                prepend_axis_num=0,
            )


def blocks(shape: Sequence[int], start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Corners and sizes of the blocks that contain elements [start, end) of a row-major tensor, in their order."""
    if start >= end:
        return
    if len(shape) == 1:
        yield (start,), (end - start,)
        return
    row = math.prod(shape[1:])
    first, last = -(-start // row), end // row

    def part_of_row(number: int, start: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        for corner, size in blocks(shape[1:], start - number * row, end - number * row):
            yield (number, *corner), (1, *size)

    if first > last:
        yield from part_of_row(last, start, end)
        return
    yield from part_of_row(first - 1, start, first * row)
    if first < last:
        yield (first, *(0 for _ in shape[1:])), (last - first, *shape[1:])
    yield from part_of_row(last, last * row, end)
