"""Processes that turn chunks into sequences, and the one that hands chunks out and takes results in their order.

A worker has one chunk at a time, and no more than a few chunks are under way, so memory does not grow with the data.
Workers are forked where nothing speaks against it: they then share the tokenizer with this process and start at once.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from isthmus.data.readers.chunks import RecordChunk
from isthmus.data.tokenize.tokenize_records import RecordTokenizer, TokenizedChunk
from isthmus.errors import Hang, IsthmusError

StartMethod = Literal["fork", "spawn", "forkserver"]
_UNDER_WAY = 4
"""Chunks a worker that are handed out or wait for an earlier one to be done."""


def start_method() -> StartMethod:
    """``fork`` where it is at home, and no thread of this process could hold a lock that a child would wait for."""
    return "fork" if sys.platform == "linux" and threading.active_count() == 1 else "spawn"


class Workers:
    """A context manager; within it, ``pieces`` may be called once."""

    def __init__(self, maker: RecordTokenizer, count: int, method: StartMethod | None = None) -> None:
        """Start ``count`` processes, each with a ``maker`` of its own."""
        context: Any = multiprocessing.get_context(method or start_method())
        self._ends: list[Connection] = []
        self._processes: list[Any] = []
        for number in range(count):
            mine, theirs = context.Pipe()
            # A forked child has copies of all our ends; it would never see that we are gone while it holds them.
            inherited = [*self._ends, mine] if context.get_start_method() == "fork" else []
            process = context.Process(
                target=_work, args=(theirs, inherited, maker), name=f"isthmus-prepare-{number}", daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)

    @property
    def pids(self) -> list[int]:
        """Of the processes."""
        return [process.pid for process in self._processes]

    def pieces(self, chunks: Iterator[RecordChunk]) -> Iterator[TokenizedChunk]:
        """What the chunks become, in their order, whoever makes it.

        Raises:
            IsthmusError: as the maker does, at the first chunk that is bad.
            Hang: a worker was lost.
        """
        idle, busy = list(self._ends), dict[Connection, int]()
        done: dict[int, TokenizedChunk | IsthmusError] = {}
        handed_out = taken = 0
        ahead: RecordChunk | IsthmusError | None = _next(chunks)
        while True:
            while taken in done:
                result = done.pop(taken)
                if isinstance(result, IsthmusError):
                    raise result
                taken += 1
                yield result
            while ahead is not None and handed_out - taken < _UNDER_WAY * len(self._ends):
                if isinstance(ahead, IsthmusError):  # what comes before it is told of first
                    done[handed_out] = ahead
                    handed_out, ahead = handed_out + 1, None
                    break
                if not idle:
                    break
                end = idle.pop(0)
                self._send(end, ahead)
                busy[end] = handed_out
                handed_out, ahead = handed_out + 1, _next(chunks)
            if taken == handed_out:
                return
            if taken in done:
                continue
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                done[busy.pop(ready)] = self._receive(ready)
                idle.append(ready)

    def _send(self, end: Connection, chunk: RecordChunk) -> None:
        try:
            end.send(chunk)
        except (BrokenPipeError, ConnectionResetError):
            raise self._lost(end) from None

    def _receive(self, end: Connection) -> TokenizedChunk | IsthmusError:
        try:
            result: TokenizedChunk | IsthmusError = end.recv()
        except (EOFError, ConnectionResetError):
            raise self._lost(end) from None
        return result

    def _lost(self, end: Connection) -> Hang:
        process = self._processes[self._ends.index(end)]
        process.join(timeout=5.0)
        code = process.exitcode
        how = f"by {signal.Signals(-code).name}" if code is not None and code < 0 else f"with exit code {code}"
        return Hang(
            f"the worker process {process.pid} was ended {how}, so the data is not prepared. Was memory short? "
            "The same command goes on from what is done; --workers N starts fewer."
        )

    def __enter__(self) -> Workers:
        """The running workers."""
        return self

    def __exit__(self, *_: object) -> None:
        """End them; idle ones see that nobody speaks to them any more."""
        for end in self._ends:
            end.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()


def _next(chunks: Iterator[RecordChunk]) -> RecordChunk | IsthmusError | None:
    try:
        return next(chunks, None)
    except IsthmusError as error:
        return error


def _work(end: Connection, inherited: Sequence[Connection], maker: RecordTokenizer) -> None:
    """A worker's life: until the other end is closed."""
    for other in inherited:
        other.close()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started us is asked too, and ends us
    gc.freeze()  # what came with the libraries stays, and need not be looked through again and again
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    os.environ["RAYON_NUM_THREADS"] = "1"
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            end.send(_made(maker, end.recv()))


def _made(maker: RecordTokenizer, chunk: RecordChunk) -> TokenizedChunk | IsthmusError:
    try:
        return maker(chunk)
    except IsthmusError as error:
        return error
    except Exception:
        return IsthmusError(f"a worker process failed, which is a bug: {traceback.format_exc()}")
