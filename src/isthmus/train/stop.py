"""A stop request, set by a signal and read between steps, micro batches and exported tensors."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from types import FrameType
from typing import Any

from isthmus.platforms import rank_env

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SECOND_REQUEST_S = 0.5
"""A batch system may send the same signal twice at once; only a later Ctrl-C is a second request."""


def answer_signal(number: int, what: str) -> None:
    """Print at once what a signal does; a handler may interrupt a write to stderr, so it has no buffer."""
    hint = " Ctrl-C again kills the run." if number == signal.SIGINT else ""
    with suppress(OSError):  # a closed terminal
        os.write(2, f"{end_of_bar()}isthmus: {signal.Signals(number).name}: {what}.{hint}\n".encode())


def end_of_bar() -> str:
    """Removes a progress bar from the line of a terminal, where it may be without an end of line."""
    return "\r\x1b[2K" if os.isatty(2) else ""


class StopFlag:
    """Set by SIGTERM, SIGINT (Ctrl-C) or SIGHUP; the loop reads ``requested`` and saves before it ends.

    Further signals are ignored: a batch system that signals twice must not interrupt the save. With one rank, the flag
    prints an answer at once, and a second Ctrl-C raises KeyboardInterrupt; with several ranks the launcher does both. A
    flag installed over another one inherits its request.
    """

    def __init__(self) -> None:
        self.interrupted: bool = False
        """Whether a second Ctrl-C raised KeyboardInterrupt, which a library may have replaced by its own error."""
        self._requested_s: float | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        return self._requested_s is not None

    @property
    def waiting_s(self) -> float:
        """Seconds since the request; 0 without one."""
        return 0.0 if self._requested_s is None else time.monotonic() - self._requested_s

    def request(self) -> None:
        """As a signal does."""
        if self._requested_s is None:
            self._requested_s = time.monotonic()

    def install(self) -> None:
        """Install the handlers; does nothing outside the main thread, where Python forbids it."""
        for number in SIGNALS:
            current = signal.getsignal(number)
            earlier = getattr(current, "__self__", None)
            if isinstance(earlier, StopFlag) and earlier.requested:
                self._requested_s = earlier._requested_s
            if current == self._received or (number == signal.SIGHUP and current == signal.SIG_IGN):
                continue  # nohup ignores SIGHUP
            try:
                signal.signal(number, self._received)
            except ValueError:
                return
            self._previous[number] = current

    def uninstall(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def __enter__(self) -> StopFlag:
        self.install()
        return self

    def __exit__(self, *exc: object) -> None:
        self.uninstall()

    def _received(self, number: int, frame: FrameType | None) -> None:
        alone = rank_env.world_size() == 1 and rank_env.stop_file() is None
        if not self.requested:
            self.request()
            if alone:
                answer_signal(number, "saving after this step")
        elif alone and number == signal.SIGINT and self.waiting_s > SECOND_REQUEST_S:
            self.interrupted = True
            raise KeyboardInterrupt
