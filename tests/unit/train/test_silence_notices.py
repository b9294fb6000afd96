from __future__ import annotations

import time

import pytest

from isthmus.engine.trace_region import trace_region
from isthmus.train.console import Console
from isthmus.train.silence_notices import SilenceNotices


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def silence(notices: SilenceNotices, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1
        notices.check()


def test_the_open_region_is_named_whenever_the_time_has_doubled() -> None:
    lines: list[str] = []
    clock = Clock()
    notices = SilenceNotices(lines.append, clock)
    silence(notices, clock, 19)
    assert lines == []
    with trace_region("loading the model"):
        silence(notices, clock, 62)
    assert lines == [f"loading the model: {time} since the last line" for time in ("0:20", "0:40", "1:20")]
    notices.line_printed()
    silence(notices, clock, 20)
    assert lines[3:] == ["running: 0:20 since the last line"]


def test_steps_of_thirty_seconds_are_no_silence() -> None:
    lines: list[str] = []
    clock = Clock()
    notices = SilenceNotices(lines.append, clock)
    notices.line_printed(of_step=True)
    silence(notices, clock, 30)
    assert len(lines) == 1, "nothing was known of the steps yet"
    for _ in range(3):
        notices.line_printed(of_step=True)
        silence(notices, clock, 30)
    assert len(lines) == 1
    silence(notices, clock, 30)
    assert len(lines) == 2


def test_a_console_prints_notices_until_it_is_closed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("isthmus.train.silence_notices.AFTER_S", 0.02)
    monkeypatch.setattr("isthmus.train.silence_notices._CHECK_S", 0.01)
    console = Console("lines")
    console.start()
    printed = ""
    while not printed:
        time.sleep(0.01)
        printed += capsys.readouterr().err
    console.close()
    assert printed.startswith("running: 0:00 since the last line")
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().err == ""
