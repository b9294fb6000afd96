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


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.usefixtures("default_sighup")
def test_a_signal_sets_the_flag(number: signal.Signals) -> None:
    with StopFlag() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested


@pytest.mark.usefixtures("one_process")
def test_second_ctrl_c_interrupts_a_single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopFlag() as stop:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # a batch system sends it twice at once
        monkeypatch.setattr("isthmus.train.stop.SECOND_REQUEST_S", 0.0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert not stop.interrupted
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        assert stop.interrupted


@pytest.mark.usefixtures("one_process")
def test_a_single_process_answers_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with StopFlag():
        os.kill(os.getpid(), signal.SIGINT)
        assert capfd.readouterr().err == ("isthmus: SIGINT: saving after this step. Ctrl-C again kills the run.\n")
        os.kill(os.getpid(), signal.SIGTERM)
        assert capfd.readouterr().err == ""


def test_the_launcher_answers_for_its_ranks(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with StopFlag():
        os.kill(os.getpid(), signal.SIGINT)
    assert capfd.readouterr().err == ""


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
