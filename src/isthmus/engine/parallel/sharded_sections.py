"""Checkpoint entries of a weight with sections of rows that tensor-parallel ranks shard one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor


def by_sections(entry: ShardedTensor, rows: Sequence[int], names: Sequence[str] = ()) -> ShardedTensorFactory:
    """The entry of a rank's rows as one entry for each section; ``rows`` are those of a rank.

    The whole tensor has section after section, each with the rows of all ranks in their order. With ``names`` each
    section is a tensor of its own, as in Megatron-Core.
    """
    local, axis = sum(rows), entry.prepend_axis_num
    rank, ranks = entry.global_offset[axis] // local, entry.global_shape[axis] // local
    plain = entry.without_data()

    @torch.no_grad()
    def build(key: str, tensor: Tensor, replica_id: Any, _flattened_range: Any) -> list[ShardedTensor]:
        starts = accumulate(rows, initial=0)
        entries = []
        for index, (section, start, number) in enumerate(zip(tensor.split(list(rows)), starts, rows, strict=False)):
            offset, shape = list(entry.global_offset), list(entry.global_shape)
            offset[axis] = rank * number + (0 if names else start * ranks)
            shape[axis] = ranks * (number if names else local)
            entries.append(
                replace(
                    plain,
                    key=f"{key}.{names[index]}" if names else key,
                    data=section,
                    dtype=tensor.dtype,
                    local_shape=tuple(section.shape),
                    global_shape=tuple(shape),
                    global_offset=tuple(offset),
                    axis_fragmentations=None,  # sections have different sizes
                    replica_id=replica_id,
                )
            )
        return entries

    @torch.no_grad()
    def merge(sections: list[Tensor]) -> Tensor:
        return torch.cat(sections)

    return ShardedTensorFactory(entry.key, entry.data, build, merge, entry.replica_id)
