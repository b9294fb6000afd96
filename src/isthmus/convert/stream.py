"""Goes over the tensors of a model a few rows at a time, several tensors at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed

import torch

from isthmus.convert.canonical import row_slices
from isthmus.convert.weight_source import Meta

Progress = Callable[[int, int], None]
"""Told after every chunk: bytes done, bytes in all."""
THREADS = 2
"""Reading and writing are copies inside the kernel: one thread cannot do more, and two fill two cores."""


def stream(
    tensors: Mapping[str, Meta], move: Callable[[str, slice], int], total_bytes: int, progress: Progress
) -> None:
    """Call ``move`` for all rows of all tensors, those of one tensor one after the other.

    Args:
        tensors: by name, in the order in which they are begun.
        move: takes a name and rows and returns the bytes that it moved.
        total_bytes: for ``progress``.
        progress: told after every chunk.

    Raises:
        Exception: the first that a call of ``move`` raised; nothing more is begun then.
    """
    stop, lock = threading.Event(), threading.Lock()
    done = 0

    def whole(name: str) -> None:
        nonlocal done
        meta = tensors[name]
        for rows in row_slices(meta.shape, meta.dtype.itemsize):
            if stop.is_set():
                return
            moved = move(name, rows)
            with lock:
                done += moved
                progress(done, total_bytes)

    # Threads of torch's own beside these would fight for the same cores.
    before = torch.get_num_threads()
    with ThreadPoolExecutor(THREADS, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        try:
            for finished in as_completed([pool.submit(whole, name) for name in tensors]):
                finished.result()
        finally:
            stop.set()
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(before)
