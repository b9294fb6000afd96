"""Unit tests start no process, unless they are marked ``processes``; ``make unit`` leaves those out."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from typing import Any, NoReturn

import pytest


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> Iterator[None]:
    """Nothing here survives the loss of power: tests/faults kills processes, and test_atomic_write counts the calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture(autouse=True)
def _no_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise AssertionError("this unit test starts a process: mark it with pytest.mark.processes")

    if request.node.get_closest_marker("processes") is None:
        monkeypatch.setattr(subprocess.Popen, "__init__", refuse)
        monkeypatch.setattr(BaseProcess, "start", refuse)
        monkeypatch.setattr(os, "fork", refuse)
