from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from isthmus.train.stop import StopFlag


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = [(number, signal.getsignal(number)) for number in numbers]
    yield
    assert [(number, signal.getsignal(number)) for number in numbers] == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.usefixtures("default_sighup")
def test_a_signal_sets_the_flag(number: signal.Signals) -> None:
    with StopFlag() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested


def test_second_ctrl_c_interrupts_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with StopFlag():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_further_signals_are_ignored_with_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with StopFlag() as stop:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.requested


def test_later_flag_inherits_a_request() -> None:
    with StopFlag() as early:
        os.kill(os.getpid(), signal.SIGTERM)
        with StopFlag() as late:
            assert late.requested and early.requested
    with StopFlag() as fresh:
        assert not fresh.requested


def test_nohup_is_respected() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopFlag() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
    finally:
        signal.signal(signal.SIGHUP, before)
