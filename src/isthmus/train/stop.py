"""A request to stop, made by a signal and honoured between two steps."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

from isthmus.platforms import rank_env

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class StopFlag:
    """Set by SIGTERM, Ctrl-C or a hang-up; the loop looks at ``requested`` and saves before it leaves.

    Further signals change nothing, so that a save is not cut short by a batch system that signals twice. Only where
    this process is the whole run does a second Ctrl-C raise KeyboardInterrupt; among several ranks the process that
    started them decides.

    A flag that is installed over another one takes over what that one has seen: a signal that came while the run was
    still being set up is not lost.
    """

    def __init__(self) -> None:
        self._signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether the run was asked to stop."""
        return self._signal is not None

    @property
    def reason(self) -> str:
        """Name of the signal that came first ("SIGTERM"); empty while there was none."""
        return self._signal.name if self._signal else ""

    def request(self, number: int = signal.SIGTERM) -> None:
        """Ask for the stop as signal ``number`` would."""
        if self._signal is None:
            self._signal = signal.Signals(number)

    def install(self) -> None:
        """Take over the signals; does nothing outside the main thread, where Python forbids it."""
        for number in SIGNALS:
            current = signal.getsignal(number)
            earlier = getattr(current, "__self__", None)
            if isinstance(earlier, StopFlag) and earlier is not self and earlier.requested:
                self._signal = self._signal or earlier._signal
            if current == self._received or (number == signal.SIGHUP and current == signal.SIG_IGN):
                continue  # nohup has asked that a hang-up be ignored
            try:
                signal.signal(number, self._received)
            except ValueError:
                return
            self._previous[number] = current

    def uninstall(self) -> None:
        """Give the signals back to whoever had them."""
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
        self.request(number)
