"""Streams the tensors of a model a few rows at a time, several tensors in parallel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from isthmus.convert.canonical import row_slices
from isthmus.convert.weight_source import TensorSpec

Progress = Callable[[int, int], None]
"""Called after every chunk with the bytes done and the total bytes."""
THREADS = 2
"""Reading and writing are copies in the kernel, and two threads saturate two cores."""


def stream(
    tensors: Mapping[str, TensorSpec], move: Callable[[str, slice], int], total_bytes: int, progress: Progress
) -> None:
    """Call ``move`` for all rows of all tensors; the rows of one tensor are moved in order by one thread.

    ``move`` takes a name and rows, and returns the bytes it moved. Its first exception ends the stream.
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

    # torch's own threads would compete with these for the same cores.
    before = torch.get_num_threads()
    with ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for finished in as_completed([pool.submit(move_tensor, name) for name in tensors]):
                finished.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)
