from __future__ import annotations

import fcntl
import logging
import os
import pty
import re
import struct
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from isthmus.train.console import Console, ProgressStyle, live_figures
from isthmus.train.metrics import StepMetrics
from isthmus.train.terminal_lines import wrapped


def metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step=step, loss=2.5, lr=1e-5, grad_norm=0.75, tokens_per_s=1234.5, mfu=0.4, memory_gib=1.5, num_tokens=100,
        loss_tokens=60, step_time_s=0.5, consumed_sequences=16,
    )  # fmt: skip


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch, width: int = 100) -> Iterator[list[str]]:
    """stderr and stdout are a pseudo terminal; yields a list that has what was written when the block has ended."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
    for name, value in (("COLUMNS", str(width)), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    for name in ("CI", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    written: list[str] = []
    with open(theirs, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        yield written
        stream.write("<end>")
        stream.flush()
        read = b""
        while not read.endswith(b"<end>"):
            read += os.read(ours, 1 << 16)
        written.append(read.decode())
    os.close(ours)


def shown(written: str) -> list[str]:
    """The lines on the screen: a carriage return with an erased line begins a line again."""
    lines = [""]
    for part in written.replace("\r\n", "\n").split("\n"):
        lines[-1] += part.rpartition("\x1b[2K")[2]
        lines.append("")
    return lines


def test_lines_prints_and_logs_stand_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    with terminal(monkeypatch) as written:
        logger = logging.getLogger("isthmus.test_console")
        handler = logging.StreamHandler()
        logger.addHandler(handler)
        console = Console()
        console.show_progress(10)
        console.print("step 1/10  loss [1.5]")
        console.advance(metrics(1), 10, 12.0)
        print("a print of a callback")
        print("a warning", file=sys.stderr)
        logger.warning("a log line")
        console.validated(2.25)
        console.advance(metrics(2), 10, 12.0)
        console.print("step 2/10")
        console.close()
        print("after the bar")
        assert handler.stream is sys.stderr
        logger.removeHandler(handler)
    (text,) = written
    lines = shown(text)
    printed = ("step 1/10  loss [1.5]", "a print of a callback", "a warning", "a log line", "step 2/10")
    assert set(printed) | {"after the bar"} <= set(lines), text
    assert "loss 2.5000  0:12 left  1,234 tok/s  valid 2.2500  MFU 40.0%" in text
    assert "\x1b[?25l" not in text, "the cursor would stay hidden after a kill"


@pytest.mark.parametrize(
    ("style", "variables", "has_bar"),
    [
        ("auto", {}, True),
        ("auto", {"CI": "true"}, False),
        ("auto", {"TERM": "dumb"}, False),
        ("lines", {}, False),
        ("bar", {"CI": "1"}, True),
    ],
)
def test_where_the_bar_is_shown(
    monkeypatch: pytest.MonkeyPatch, style: ProgressStyle, variables: dict[str, str], has_bar: bool
) -> None:
    with terminal(monkeypatch) as written:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        console = Console(style)
        console.show_progress(10)
        console.print("a line")
        console.close()
    assert ("training" in written[0]) == has_bar and "a line" in written[0]


def test_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    for style, has_bar in (("auto", False), ("bar", True)):
        console = Console(style)  # type: ignore[arg-type]
        console.show_progress(3)
        console.print("a \x1b[2Jline")
        console.close()
        output = capsys.readouterr().err
        assert ("training" in output) == has_bar and r"a \x1b[2Jline" in output


def test_prose_breaks_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/runs/" + "long" * 20
    prose = f"data.seq_length=2048 is more than the 1,024 positions of this model, see {path} for all of its settings"
    step = "x" * 80
    with terminal(monkeypatch, width=80) as written:
        console = Console()
        console.print(prose)
        console.show_progress(10)
        console.print(prose)
        console.print(step)
        console.close()
    lines = shown(written[0])
    expected = [
        "data.seq_length=2048 is more than the 1,024 positions of this model, see",
        f"  {path}",
        "  for all of its settings",
    ]
    assert lines[:3] == expected and expected[2] in lines[3:] and step in lines
    assert wrapped(prose, 0) == prose


def test_an_echoed_ctrl_c_fits_beside_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the next line of the terminal, the bar above could not be erased."""
    with terminal(monkeypatch, width=80) as written:
        console = Console()
        console.show_progress(10)
        console.advance(metrics(2), 10, 12.0)
        console.close()
    bars = [
        line for line in re.split(r"\r|\n", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", written[0])) if "training" in line
    ]
    assert bars and max(map(len, bars)) <= 80 - len("^C")


@pytest.mark.parametrize("width", [20, 40, 60, 80])
def test_figures_fit_the_terminal(width: int) -> None:
    text = live_figures(metrics(7), 1000, 3661.0, "valid 2.2500", width)
    assert len(text) <= width and text.startswith("step    7/1000")
    wide: dict[str, Any] = {"total_steps": 1000, "left_s": 3661.0, "validation": "valid 2.2500", "width": 200}
    assert live_figures(metrics(7), **wide).endswith("1:01:01 left  1,234 tok/s  valid 2.2500  MFU 40.0%  1.5 GiB")
