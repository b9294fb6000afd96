"""What a run shows and records while it trains: events, explained steps, slow ranks."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from faults.command import environment, rows
from faults.fork_server import ForkServer


def events(out: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in rows(out, "events.jsonl") if row["event"] == kind]


def losses(out: Path) -> list[float]:
    return [row["loss"] for row in rows(out) if "loss" in row]


def test_a_spike_names_samples_and_changes_nothing(
    isthmus: ForkServer, sft_args: list[str], chats: Path, tmp_path: Path
) -> None:
    run = [*sft_args, "train.steps=28", "checkpoint.save_final=false", "checkpoint.export_final=false"]
    done = isthmus(*run, "logging.spike_factor=0.01")
    assert done.returncode == 0, done
    results = events(tmp_path / "out", "spike")
    assert results and results[0]["text"] in done.stderr
    number = len(json.loads(chats.read_text()))
    for sample in results[0]["samples"]:
        assert sample["file"] == str(chats) and 1 <= sample["record"] <= number and sample["loss_tokens"] > 0
    assert [item["loss"] for item in results[0]["samples"]] == sorted(
        (s["loss"] for s in results[0]["samples"]), reverse=True
    )
    assert isthmus(*run, "logging.spike_factor=null", "--out", str(tmp_path / "plain")).returncode == 0
    assert losses(tmp_path / "out") == losses(tmp_path / "plain") and not (tmp_path / "plain" / "events.jsonl").exists()


def test_a_step_that_is_not_finite_is_explained(isthmus: ForkServer, sft_args: list[str], tmp_path: Path) -> None:
    line = isthmus(*sft_args, "train.precision=bf16", "optim.lr=1e38", "optim.clip_grad=0").error(79)
    (event,) = events(tmp_path / "out", "not finite")
    first = event["tensors"][0]
    assert f"{first['name']}, on rank 0" in line and "The first value that is not finite is in the" in line
    assert event["step"] == len(losses(tmp_path / "out")) + 1 and event["text"] in line


def on_a_terminal(args: list[str], until: str) -> tuple[int, str]:
    """Run the command in a pseudo terminal and press Ctrl-C when ``until`` is shown; returns exit code and output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    variables = {name: value for name, value in environment().items() if name not in ("CI", "COLUMNS")}
    # The child makes the terminal its own, so that Ctrl-C reaches it as a signal.
    child = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
    child += "from isthmus.cli.main import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", child, *args], stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        env=variables | {"TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    text, pressed = "", False
    while select.select([ours], [], [], 120)[0]:
        try:
            text += os.read(ours, 1 << 16).decode(errors="replace")
        except OSError:  # closed
            break
        if until in text and not pressed:
            pressed = True
            os.write(ours, b"\x03")
    os.close(ours)
    return process.wait(60), text


@pytest.mark.thorough
def test_the_bar_of_two_ranks_and_ctrl_c(sft_args: list[str], tmp_path: Path) -> None:
    code, text = on_a_terminal(
        [*sft_args, "--nproc", "2", "train.steps=20000", "logging.ranks_every=1"], until="10/20000"
    )
    assert code == 75, text
    assert "\x1b[?25l" not in text, "the cursor would stay hidden after a kill"
    lines = [line.rpartition("\x1b[2K")[2] for line in text.replace("\r\n", "\n").split("\n")]
    assert [line for line in lines if line.startswith("isthmus: SIGINT: saving after this step.")], text
    steps = [line.rstrip() for line in lines if line.startswith("step ")]
    assert steps and max(map(len, steps)) <= 80 and "tok/s" in steps[-1], text
    bars = [part for part in text.split("\x1b[2K") if part.startswith("training")]
    assert bars and "loss" in bars[-1] and "GiB" in bars[-1] and " left" in "".join(bars)
    assert {"slowest_rank", "straggler_share"} <= rows(tmp_path / "out")[-1].keys()
    stop = events(tmp_path / "out", "stop")[0]
    assert f"stopped after step {stop['step']}" in lines[-2] and rows(tmp_path / "out")[-1]["step"] == stop["step"]
