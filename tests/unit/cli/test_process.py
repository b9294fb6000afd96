from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from isthmus.cli.process import ExitStatus, exit_status_of, print_error, save_traceback
from isthmus.errors import DataError, Preempted


def raising(error: BaseException) -> ExitStatus:
    def run() -> NoReturn:
        raise error

    return exit_status_of(run)


class OutOfMemoryError(RuntimeError):
    """Named as in torch."""


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DataError("a.json:3: not JSON."), 65, "a.json:3: not JSON."),
        (Preempted("saved."), 75, "saved."),
        (OSError(errno.ENOSPC, "No space left on device", "out/x"), 73, "out/x: no space is left."),
        (OSError(errno.EIO, "Input/output error", "out/x"), 74, "out/x: Input/output error."),
        (PermissionError(errno.EACCES, "Permission denied", "m"), 74, "m: Permission denied."),
        (Exception("No space left on device (os error 28)"), 73, "no space is left"),  # of a library in Rust
        (RuntimeError("open file failed with strerror: Input/output error"), 74, "Input/output error"),  # torch
        (RuntimeError("basic_ios::clear: iostream error"), 74, "iostream error"),
        (OSError("5 requested and 0 written"), 74, "5 requested and 0 written"),  # NumPy
        (OSError("no such model"), 70, "no such model"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (MemoryError(), 70, "out of memory"),
        (OutOfMemoryError("HIP out of memory"), 70, "recompute=full"),
        (ValueError("bad\nthing"), 70, "ValueError: bad thing (unexpected; --debug shows the traceback)"),
        (SystemExit(3), 3, ""),
        (SystemExit(None), 0, ""),
    ],
)
def test_every_exception_has_an_exit_code_and_one_line(error: BaseException, code: int, message: str) -> None:
    status = raising(error)
    assert status.exit_code == code and message in status.message
    assert "\n" not in status.message


def test_exit_codes_are_returned() -> None:
    assert exit_status_of(lambda: None) == exit_status_of(lambda: 0) == ExitStatus(0)
    assert exit_status_of(lambda: 75) == ExitStatus(75)


def test_traceback_only_with_debug(capsys: pytest.CaptureFixture[str]) -> None:
    status = raising(DataError("bad file."))
    print_error(status, debug=False)
    assert capsys.readouterr().err == "isthmus: bad file.\n"
    print_error(status, debug=True)
    assert "Traceback" in capsys.readouterr().err


def test_traceback_of_a_bug_is_saved_in_the_run_folder(tmp_path: Path) -> None:
    bug = raising(ValueError("x"))
    assert save_traceback(bug, tmp_path) == bug and not list(tmp_path.iterdir())  # not a run folder yet
    (tmp_path / "config.yaml").touch()
    saved = save_traceback(bug, tmp_path)
    assert "Traceback" in (tmp_path / "error.txt").read_text() and "error.txt" in saved.message
    known = raising(DataError("x"))
    assert save_traceback(known, tmp_path) == known


@pytest.mark.processes
def test_closed_streams_are_opened() -> None:
    """Else the first file that a command opens is number 2, and gets what libraries print."""
    command = [sys.executable, "-c", "import sys; from isthmus.cli.main import main; sys.exit(main())"]
    closed = subprocess.run(
        [*command, "config", "show", "x"], stdout=subprocess.PIPE, preexec_fn=lambda: os.close(2), text=True
    )
    assert (closed.returncode, closed.stdout) == (2, "")


@pytest.mark.processes
@pytest.mark.parametrize("verb", ["version", "config ls"])  # one leaves its output to the buffer, one flushes it
def test_a_closed_stdout_ends_the_command_in_silence(verb: str) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "isthmus", *verb.split()]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, env=environment, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.processes
def test_a_full_disk_under_stdout_is_one_error() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "isthmus", "version"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 73
    assert done.stderr.startswith("isthmus: no space is left.") and done.stderr.count("\n") == 1


def test_a_closed_stderr_is_not_another_error(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as closed:
        monkeypatch.setattr(sys, "stderr", closed)
        print_error(raising(DataError("bad file.")), debug=False)
        monkeypatch.undo()
        with contextlib.suppress(BrokenPipeError):
            closed.close()
