"""Router replay: a router weighs the experts that a rollout chose, in place of its own choice."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.host_copies import to_device
from isthmus.engine.parallel.context_parallel import local_tokens


def local_experts(batch: PackedBatch, rank: int, ranks: int, device: torch.device) -> Tensor | None:
    """The experts of a rollout for the rows of this rank, int16 [rows, layers, K]; None: the routers choose.

    Under sequence parallelism each tp ``rank`` of ``ranks`` has an equal part of the batch.
    """
    if batch.routed_experts is None:
        return None
    rows = batch.layer_rows(local_tokens(batch.routed_experts, batch.spans))
    return to_device(rows.chunk(ranks)[rank].contiguous(), device)


def replayed(batch: PackedBatch | None, layer: int, chosen: Tensor) -> Tensor:
    """The experts of a layer, counted from 0 in the whole model: those of the rollout, else ``chosen``; int64 [T, K].

    A rollout knows nothing of padding and of MTP layers.
    """
    if batch is None or batch.routed_experts is None or layer >= batch.routed_experts.size(1):
        return chosen
    experts = batch.routed_experts[:, layer]
    return torch.where(experts >= 0, experts.long(), chosen)


def differs(first: Tensor, second: Tensor) -> Tensor:
    """Whether two choices [T, K] of a token are different experts, in any order; bool [T]."""
    return (first.sort(dim=-1).values != second.sort(dim=-1).values).any(dim=-1)
