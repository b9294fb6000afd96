"""Streams tensors a few rows at a time, several tensors in parallel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from isthmus.convert.canonical import row_slices
from isthmus.convert.weight_source import TensorSpec

Progress = Callable[[int, int], None]
"""Called after every chunk with (bytes done, total bytes)."""
THREADS = 2
"""Reads and writes are copies in the kernel; two threads saturate two cores."""


def stream(
    tensors: Mapping[str, TensorSpec], move: Callable[[str, slice], int], total_bytes: int, progress: Progress
) -> None:
    """Call ``move`` for all rows of all tensors; one thread moves the rows of one tensor, in order.

    ``move`` returns the bytes it moved. The first exception stops all threads.
    """
    stop, lock = threading.Event(), threading.Lock()
    done = 0

    def move_tensor(name: str) -> None:
        nonlocal done
        spec = tensors[name]
        for rows in row_slices(spec.shape, spec.dtype.itemsize):
            if stop.is_set():
                return
            moved = move(name, rows)
            with lock:
                done += moved
                progress(done, total_bytes)

    # Intra-op threads of torch would compete for the same cores.
    before = torch.get_num_threads()
    with ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for finished in as_completed([pool.submit(move_tensor, name) for name in tensors]):
                finished.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)
