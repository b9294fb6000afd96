"""A model as whole tensors under canonical names, the common form of all conversions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from isthmus.engine.checkpoint.checkpoint_names import Spelling
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family, Placement
from isthmus.hf.tensors.parallel_writer import TensorWriter

CHUNK_BYTES = 4 << 20
"""Per thread; small enough for the CPU cache and for reuse by the allocator (32 MiB takes three times the CPU time)."""


class CanonicalWeights(Protocol):
    """Reads tensors by canonical name, a few rows at a time; ``str`` of it names the source."""

    def dtype(self, canonical: str) -> torch.dtype:
        """Dtype of a tensor."""

    def read(self, canonical: str, rows: slice) -> Tensor:
        """Rows of a whole tensor, without vocabulary padding; ``rows`` has start and stop. Thread-safe."""


class Destination(ABC):
    """Files with space for all tensors, created by the constructor; rows may be written in any order."""

    total_bytes: int
    """Bytes that all calls of ``put`` write together."""
    writer: TensorWriter
    """A context manager that syncs and closes the files."""

    @abstractmethod
    def put(self, canonical: str, rows: slice, chunk: Tensor) -> int:
        """Write these rows; returns the bytes written. Thread-safe."""


def unique_placements(family: Family, arch: Architecture) -> dict[str, Placement]:
    """All tensors except a tied output layer."""
    return {name: placed for name, placed in family.placements(arch).items() if not placed.rule.alias}


def spelling_of(arch: Architecture) -> Spelling:
    moe = arch.moe
    return Spelling(
        num_layers=arch.num_layers,
        num_experts=moe.num_experts if moe is not None else 0,
        moe_layers=frozenset(layer for layer in range(arch.num_layers + arch.mtp_layers) if arch.is_moe(layer)),
        latent=arch.mla is not None,
    )


def row_slices(shape: tuple[int, ...], itemsize: int) -> Iterator[slice]:
    """Rows of about ``CHUNK_BYTES``."""
    rows, *tail = shape
    step = max(1, CHUNK_BYTES // max(1, torch.Size(tail).numel() * itemsize))
    for start in range(0, rows, step):
        yield slice(start, min(rows, start + step))
