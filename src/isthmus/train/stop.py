"""A stop request, set by a signal and read between steps, micro batches and exported tensors."""

from __future__ import annotations

import signal
import time
from types import FrameType
from typing import Any

from isthmus.platforms import rank_env

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopFlag:
    """Set by SIGTERM, SIGINT (Ctrl-C) or SIGHUP; the loop reads ``requested`` and saves before it ends.

    Further signals are ignored: a batch system that signals twice must not interrupt the save. With one rank, a second
    Ctrl-C raises KeyboardInterrupt; with several ranks the launcher decides. A flag installed over another one inherits
    its request.
    """

    def __init__(self) -> None:
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
        alone = rank_env.world_size() == 1
        if self.requested and alone and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.request()
