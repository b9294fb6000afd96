"""A model as whole tensors under Megatron-Core's names, the form that every conversion passes through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from isthmus.engine.checkpoint.checkpoint_names import Spelling
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family, Placement
from isthmus.hf.tensors.parallel_writer import TensorWriter

CHUNK_BYTES = 4 << 20
"""Bytes of a tensor in memory at a time, in each thread: small enough to be in the cache when they are written, and for
the allocator to reuse the same memory. With 32 MiB, a conversion takes three times the processor time."""


class CanonicalWeights(Protocol):
    """Tensors under canonical names, read a few rows at a time; ``str`` of it names the source."""

    def dtype(self, canonical: str) -> torch.dtype:
        """Element type of a tensor."""

    def read(self, canonical: str, rows: slice) -> Tensor:
        """Rows of a whole tensor, without vocabulary padding; start and stop are given. Thread-safe."""


class Destination:
    """Files with space for all tensors, which accept the rows of a tensor in any order.

    They are created by the constructor, which raises NoSpace or IOFailure if that fails.
    """

    total_bytes: int
    """Bytes that all calls of ``put`` write together."""
    _writer: TensorWriter

    def put(self, canonical: str, rows: slice, chunk: Tensor) -> int:
        """Write these rows of a tensor; returns the bytes written. Thread-safe."""
        raise NotImplementedError

    def close(self, *, sync: bool = True) -> None:
        """Close the files, after an fsync if ``sync``."""
        self._writer.close(sync=sync)


def unique_placements(family: Family, arch: Architecture) -> dict[str, Placement]:
    """The tensors of a model, each once: a tied output layer is left out, since it is the embedding."""
    return {name: placed for name, placed in family.placements(arch).items() if not placed.rule.alias}


def spelling_of(arch: Architecture) -> Spelling:
    """The properties of a model that determine its tensor names in Megatron-Core."""
    moe = arch.moe
    return Spelling(
        num_layers=arch.num_layers,
        num_experts=moe.num_experts if moe is not None else 0,
        moe_layers=frozenset(layer for layer in range(arch.num_layers + arch.mtp_layers) if arch.is_moe(layer)),
        latent=arch.mla is not None,
    )


def row_slices(shape: tuple[int, ...], itemsize: int) -> Iterator[slice]:
    """Split a tensor into rows of about ``CHUNK_BYTES``."""
    rows, *tail = shape
    step = max(1, CHUNK_BYTES // max(1, torch.Size(tail).numel() * itemsize))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))
