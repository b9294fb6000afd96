"""Unit tests start no process, unless they are marked ``processes``; ``make unit`` leaves those out."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Nothing here survives the loss of power: tests/faults kills processes, and test_atomic_write counts the calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


class _Guard:
    """Refuses to start processes in tests without the marker."""

    allowed = True

    def wrap(self, start: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(start)
        def checked(*args: Any, **options: Any) -> Any:
            if not self.allowed:
                raise AssertionError("this unit test starts a process: mark it with pytest.mark.processes")
            return start(*args, **options)

        return checked


_guard = _Guard()


@pytest.fixture(scope="session", autouse=True)
def _guarded_starts() -> Iterator[None]:
    # Hooks below and not a fixture of each test, which would take as long as a short test.
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((subprocess.Popen, "__init__"), (BaseProcess, "start"), (os, "fork")):
            patch.setattr(owner, name, _guard.wrap(getattr(owner, name)))
        yield


def pytest_runtest_setup(item: pytest.Item) -> None:
    _guard.allowed = item.get_closest_marker("processes") is not None


def pytest_runtest_teardown() -> None:
    _guard.allowed = True
