"""A model as whole tensors under canonical names, the common form of all conversions, and how they are streamed."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch
from torch import Tensor

from isthmus.convert.weight_source import TensorSpec
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family, Placement
from isthmus.hf.tensors.parallel_writer import TensorWriter
from isthmus.hf.tensors.safetensors_format import bounds_of, row_chunks

CHUNK_BYTES = 4 << 20
"""Per thread; small enough for the CPU cache and for reuse by the allocator (32 MiB takes three times the CPU time)."""
Progress = Callable[[int, int], None]
"""Called after every chunk with (bytes done, total bytes)."""
THREADS = 2
"""Reads and writes are copies in the kernel; two threads saturate two cores."""


class CanonicalWeights(ABC):
    """Reads tensors by canonical name, a few rows at a time."""

    source: object

    def __str__(self) -> str:
        return str(self.source)

    @abstractmethod
    def dtype(self, canonical: str) -> torch.dtype:
        """Dtype of a tensor."""

    @abstractmethod
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


def row_slices(shape: tuple[int, ...], itemsize: int) -> Iterator[slice]:
    """Rows of about ``CHUNK_BYTES``."""
    return (rows for _, rows in row_chunks(bounds_of(shape, None), itemsize, CHUNK_BYTES))


def stream(
    tensors: Mapping[str, TensorSpec], move: Callable[[str, slice], int], total_bytes: int, progress: Progress
) -> None:
    """Call ``move`` for all rows of all tensors; one thread moves the rows of one tensor, in order.

    ``move`` returns the bytes it moved. The first exception stops all threads.
    """
    stop, lock = threading.Event(), threading.Lock()
    waiting = iter(tensors.items())
    done = 0

    def next_tensor() -> tuple[str, TensorSpec] | None:
        with lock:
            return None if stop.is_set() else next(waiting, None)

    def move_tensors() -> None:
        nonlocal done
        try:
            while (tensor := next_tensor()) is not None:
                name, spec = tensor
                for rows in row_slices(spec.shape, spec.dtype.itemsize):
                    if stop.is_set():
                        return
                    moved = move(name, rows)
                    with lock:
                        done += moved
                        progress(done, total_bytes)
        except BaseException:
            stop.set()
            raise

    # Intra-op threads of torch would compete for the same cores. Threads that move little wait for each other.
    before, threads = torch.get_num_threads(), THREADS if total_bytes > CHUNK_BYTES else 1
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for finished in as_completed([pool.submit(move_tensors) for _ in range(threads)]):
                finished.result()
        finally:
            stop.set()
            torch.set_num_threads(before)
