"""Tokenizes chunks of records in several processes, in order; memory does not grow with the data."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from itertools import islice
from typing import Any, Literal

from isthmus.data.readers.chunks import RecordChunk
from isthmus.data.tokenize.tokenize_records import RecordTokenizer, TokenizedChunk
from isthmus.errors import Hang, IsthmusError

StartMethod = Literal["fork", "spawn", "forkserver"]
IN_FLIGHT = 4
"""Chunks per worker that are queued, or done and waiting for an earlier one."""
CHUNKS_BEFORE_SPAWN = 32
"""Chunks (8 MB) that this process tokenizes first: as much as a spawned worker takes to import all libraries."""
_worker: list[RecordTokenizer] = []  # in a worker process: its tokenizer


def start_method() -> StartMethod:
    """``fork`` on Linux with one thread; else ``spawn``, since another thread's lock stays locked after a fork.

    Process groups of torch.distributed have threads that Python does not count.
    """
    dist = sys.modules.get("torch.distributed")  # a worker of Ray need not import torch
    in_group = dist is not None and dist.is_available() and dist.is_initialized()
    has_one_thread = threading.active_count() == 1 and not in_group
    return "fork" if sys.platform == "linux" and has_one_thread else "spawn"


def tokenize_chunks(
    tokenizer: RecordTokenizer, chunks: Iterator[RecordChunk], workers: int, method: StartMethod | None = None
) -> Generator[TokenizedChunk, None, None]:
    """Tokenize ``chunks`` in ``workers`` processes; close the iterator to stop early.

    An error is raised after the results of the chunks before it; Hang if a worker process died.
    """
    method = method or start_method()
    if method != "fork":
        yield from map(tokenizer, islice(chunks, CHUNKS_BEFORE_SPAWN))
    pool = ProcessPoolExecutor(workers, multiprocessing.get_context(method), _start_worker, (tokenizer,))
    try:
        yield from _in_order(pool, chunks, IN_FLIGHT * workers, method)
    except BrokenProcessPool as error:
        raise Hang(
            "a worker process ended before its result (killed, perhaps for lack of memory), so the data is not "
            "prepared. Run the same command again to continue from the finished parts; isthmus prepare --workers N "
            "starts fewer."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def call_each(
    function: Callable[[Any], None], items: Sequence[Any], workers: int, method: StartMethod | None = None
) -> None:
    """Call ``function`` for each item in one of ``workers`` processes; Hang if a process died."""
    context = multiprocessing.get_context(method or start_method())
    pool = ProcessPoolExecutor(workers, context, _start_worker)
    try:
        with nullcontext() if context.get_start_method() == "fork" else _without_main_module():
            running = [pool.submit(function, item) for item in items]
        for result in running:
            result.result()
    except BrokenProcessPool as error:
        raise Hang(
            "a worker process ended before its result (killed, perhaps for lack of memory). Run the same command again "
            "to continue; isthmus prepare --workers N starts fewer."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(
    pool: ProcessPoolExecutor, chunks: Iterator[RecordChunk], in_flight: int, method: StartMethod
) -> Iterator[TokenizedChunk]:
    pending: deque[Future[TokenizedChunk]] = deque()
    read_error: IsthmusError | None = None
    reading = True
    while reading or pending:
        while reading and len(pending) < in_flight:
            try:
                chunk = next(chunks, None)
            except IsthmusError as error:  # raised after the results of the chunks before it
                chunk, read_error = None, error
            if chunk is None:
                reading = False
                break
            with nullcontext() if method == "fork" else _without_main_module():
                pending.append(pool.submit(_tokenize, chunk))
        if pending:
            yield pending.popleft().result()
    if read_error is not None:
        raise read_error


@contextmanager
def _without_main_module() -> Iterator[None]:
    """Spawned processes import the main module; a user's script without a main guard would start its run again."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


def _start_worker(*tokenizer: RecordTokenizer) -> None:
    _worker.extend(tokenizer)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles it and ends the workers
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    gc.freeze()  # excludes imported libraries from collections
    limit_threads()


def limit_threads() -> None:
    """The processes are the parallelism."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _tokenize(chunk: RecordChunk) -> TokenizedChunk:
    return _worker[0](chunk)
