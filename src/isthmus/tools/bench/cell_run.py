"""Runs the training of a cell in a process of its own, and reads its figures."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from isthmus.config.load import dump
from isthmus.config.schema import RunConfig
from isthmus.errors import CheckFailed
from isthmus.files.input_files import read_json
from isthmus.launch.local_launcher import exit_with_parent
from isthmus.tools.bench.step_clock import STEPS_FILE

Command = Callable[[Sequence[str]], int]
"""Runs ``isthmus`` with these arguments in the calling process; returns the exit code."""
_LARGEST_LOG = 1 << 20


def run_cell(
    config: RunConfig, *, nproc: int, warmup: int, timeout_s: float, command: Command, watch: Callable[[int], None]
) -> dict[str, Any]:
    """Train; returns the figures of the measured steps.

    Args:
        config: its ``out`` is replaced. The log is beside it.
        warmup: steps that are not measured.
        command: runs the training as a user's command does, with its launcher.
        watch: is called with the number of steps done, a few times per second.

    Raises:
        CheckFailed: the run failed, with its error, or took longer than ``timeout_s``.
    """
    out = Path(config.out)
    shutil.rmtree(out, ignore_errors=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    file, log, result = (out.with_name(f"{out.name}.{end}") for end in ("yaml", "log", "json"))
    file.write_text(dump(config), encoding="utf-8")
    arguments = [config.recipe, str(file), "--nproc", str(nproc), "--json"]
    process = multiprocessing.get_context("fork").Process(target=_run, args=(command, arguments, result, log))
    process.start()
    deadline_s = time.monotonic() + timeout_s
    try:
        while process.exitcode is None and time.monotonic() < deadline_s:
            process.join(0.25)
            watch(_steps_done(out / "metrics.jsonl"))
    finally:
        ended = process.exitcode is not None
        if not ended:
            _kill(process.pid or 0)
            process.join()
    if not ended:
        raise CheckFailed(
            f"not finished after {timeout_s:g} s, with {_steps_done(out / 'metrics.jsonl')} steps done. Raise --timeout"
        )
    if process.exitcode:
        raise CheckFailed(_error(log, process.exitcode))
    figures = step_figures(read_json(out / STEPS_FILE), warmup=warmup, nproc=nproc)
    return figures | {"memory_gib": read_json(result)["memory_gib"]}


def step_figures(rows: Sequence[Mapping[str, Any]], *, warmup: int, nproc: int) -> dict[str, Any]:
    """Medians over the steps after the first ``warmup`` ones, from the ends of the steps; and their times."""
    ends, measured = [row["end_s"] for row in rows], rows[warmup:]
    times = [end - start for start, end in zip(ends[warmup - 1 : -1], ends[warmup:], strict=True)]
    skipped = (rows[-1].get("skipped") or 0) - (rows[warmup - 1].get("skipped") or 0)
    if skipped:
        raise CheckFailed(f"{skipped} measured steps overflowed in fp16 and changed no weights. Raise --warmup")

    def median(name: str) -> float | None:
        if any(row.get(name) is None for row in measured):
            return None
        # Of a rate over the time that the run has measured, which excludes the time between two steps.
        shares = [row["step_time_s"] / time_s for row, time_s in zip(measured, times, strict=True)]
        return statistics.median(row[name] * share for row, share in zip(measured, shares, strict=True))

    tokens_per_s = median("tokens_per_s") or 0.0
    quartiles = statistics.quantiles(times, n=4) if len(times) > 1 else [times[0]] * 3
    return {
        "tokens_per_s": tokens_per_s,
        "tokens_per_s_per_device": tokens_per_s / nproc,
        "tflops_per_device": median("tflops_per_device"),
        "mfu": median("mfu"),
        "step_time_s": statistics.median(times),
        "step_time_spread": (quartiles[2] - quartiles[0]) / statistics.median(times),
        "mean_step_time_s": statistics.fmean(times),
        "step_times_s": times,
    }


def _run(command: Command, arguments: Sequence[str], result: Path, log: Path) -> None:
    """In the new process: run the command with its output in files."""
    os.setsid()  # Ctrl-C goes to the benchmark, which ends this process
    exit_with_parent()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, path in ((1, result), (2, log)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(file, stream)
        os.close(file)
    sys.exit(command(arguments))


def _kill(pid: int) -> None:
    """End a process and its ranks, which have sessions of their own."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for member in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                member.kill()


def _steps_done(metrics: Path) -> int:
    return metrics.read_bytes().count(b"\n") if metrics.exists() else 0


def _error(log: Path, exit_code: int) -> str:
    """What the command printed as its error."""
    text = log.read_bytes()[-_LARGEST_LOG:].decode("utf-8", "replace").strip()
    _, separator, error = text.rpartition("\nisthmus: ")
    if separator or text.startswith("isthmus: "):
        return " ".join((error if separator else text.removeprefix("isthmus: ")).split())
    ended = f"was ended by signal {-exit_code}" if exit_code < 0 else f"ended with exit code {exit_code}"
    hint = ". The system may have run out of memory" if exit_code == -signal.SIGKILL else ""
    last = text.splitlines()[-1:] or ["nothing"]
    return f"the run {ended}{hint}. Its last output: {last[0].strip()}"
