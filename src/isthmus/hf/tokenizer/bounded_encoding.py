"""Tokenizing that ends: a tokenizer comes with a model folder, and may be hostile.

A normalizer can multiply a text, and a regular expression of a pre-tokenizer can backtrack without end.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from threading import Thread
from typing import TypeVar

import psutil

from isthmus.errors import UnsafeInput

T = TypeVar("T")
TIME_S, CHARACTER_S = 10.0, 20e-6
"""CPU time of this process for a text, and more for each of its characters. Tokenizers need about 1e-6 s."""
MEMORY_BYTES, CHARACTER_BYTES = 2 << 30, 512
"""Memory, and more for each character."""
_LOOK_S = 0.1


def within_limits(encode: Callable[[], T], characters: int, origin: str) -> T:
    """The result of ``encode``, which releases the GIL; ``origin`` is the tokenizer in messages.

    Raises:
        UnsafeInput: it needs too much time or memory, or panics. Its thread cannot be ended before the process.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(encode())
        except BaseException as error:  # a panic of Rust is not an Exception
            errors.append(error)

    began_s, began_cpu_s = time.monotonic(), time.process_time()
    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(_LOOK_S)
    if thread.is_alive():
        _wait(thread, characters, origin, began_s, began_cpu_s)
    if not errors:
        return results[0]
    if type(errors[0]).__name__ == "PanicException":  # it cannot be pickled
        raise UnsafeInput(
            f"{origin} is refused: it fails on a text: {str(errors[0]).strip():.300}. Does a regular expression of it "
            "backtrack? Use another tokenizer (tokenizer.path)."
        )
    raise errors[0]


def _wait(thread: Thread, characters: int, origin: str, began_s: float, began_cpu_s: float) -> None:
    process = psutil.Process(os.getpid())
    time_s = TIME_S + CHARACTER_S * characters
    memory = MEMORY_BYTES + CHARACTER_BYTES * characters
    most = process.memory_info().rss + memory
    while thread.is_alive():
        # Not the time that other processes took; other threads of this one may use more CPU time than passes.
        if min(time.process_time() - began_cpu_s, time.monotonic() - began_s) > time_s:
            limit = f"{time_s:.0f} s"
        elif process.memory_info().rss > most:
            limit = f"{memory / 2**30:.1f} GiB of memory"
        else:
            thread.join(_LOOK_S)
            continue
        raise UnsafeInput(
            f"{origin} is refused: it takes more than {limit} for {characters:,} characters. Use another tokenizer "
            "(tokenizer.path)."
        )
