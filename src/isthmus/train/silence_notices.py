"""A line of what a run does, after a time without any other line."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from isthmus.engine.trace_region import current_region
from isthmus.train.metrics import duration

AFTER_S = 20.0
_CHECK_S = 1.0


class SilenceNotices:
    """Prints the open trace region after 20 s without a line, and again whenever the time has doubled.

    A run that prints every 30 s is not silent: a notice comes after twice the longest time between two lines of steps.
    """

    def __init__(self, print_line: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._print_line = print_line
        self._clock = clock
        self._last = clock()
        self._last_step: float | None = None
        self._after = self._next = AFTER_S
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._last = self._clock()
        self._thread = threading.Thread(target=self._watch, name="silence-notices", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def line_printed(self, *, of_step: bool = False) -> None:
        now = self._clock()
        if of_step:
            if self._last_step is not None:
                self._after = max(self._after, 2 * (now - self._last_step))
            self._last_step = now
        self._last, self._next = now, self._after

    def check(self) -> None:
        """Print a notice if it is due."""
        silent_s = self._clock() - self._last
        if silent_s >= self._next:
            self._next = 2 * silent_s
            self._print_line(f"{current_region() or 'running'}: {duration(silent_s)} since the last line")

    def _watch(self) -> None:
        while not self._stop.wait(_CHECK_S):
            self.check()
