"""A model as named tensors in Megatron-Core's words, whole and in no format: what every conversion goes through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from isthmus.engine.checkpoint.checkpoint_names import Spelling
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family, Placement

CHUNK_BYTES = 4 << 20
"""Of a tensor, so much is in memory at a time in each thread: what is read is still in the cache when it is written,
and the allocator takes the same memory again. With 32 MiB, a conversion takes three times the processor time."""


class CanonicalWeights(Protocol):
    """Tensors under canonical names, read a few rows at a time; ``str`` of it says where they come from."""

    def dtype(self, canonical: str) -> torch.dtype:
        """Element type of a tensor."""

    def read(self, canonical: str, rows: slice) -> Tensor:
        """Rows of a whole tensor, without the vocabulary's padding; start and stop are given. Threads may share it."""


class Destination(Protocol):
    """Files that are laid out, and take the rows of a tensor in any order."""

    total_bytes: int
    """What ``put`` will have written in the end."""

    def put(self, canonical: str, rows: slice, chunk: Tensor) -> int:
        """Write these rows of a tensor; returns the bytes written. Threads may share it."""

    def close(self, *, sync: bool = True) -> None:
        """Close the files, on disk if ``sync``."""


def own_placements(family: Family, arch: Architecture) -> dict[str, Placement]:
    """The tensors of a model, each once: a tied output layer is the embedding."""
    return {name: placed for name, placed in family.placements(arch).items() if not placed.rule.alias}


def spelling_of(arch: Architecture) -> Spelling:
    """What decides the names of the model's tensors in Megatron-Core."""
    moe = arch.moe
    return Spelling(
        num_layers=arch.num_layers,
        num_experts=moe.num_experts if moe is not None else 0,
        moe_layers=frozenset(layer for layer in range(arch.num_layers + arch.mtp_layers) if arch.is_moe(layer)),
        latent=arch.mla is not None,
    )


def row_slices(shape: tuple[int, ...], itemsize: int) -> Iterator[slice]:
    """Cut a tensor into rows of about ``CHUNK_BYTES``."""
    rows, *tail = shape
    step = max(1, CHUNK_BYTES // max(1, torch.Size(tail).numel() * itemsize))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))
