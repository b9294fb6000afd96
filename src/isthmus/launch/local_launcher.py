"""Several ranks on this machine, started by the command itself: torch elastic in this process, one child a rank.

The children run the same command line and know from their environment that they are ranks. A signal to this process
is passed on to them; they save and leave. How each ended is read from its report, since elastic itself only tells
that something failed.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import isthmus
from isthmus.errors import Preempted
from isthmus.launch.first_failure import (
    PREEMPTED,
    REPORTS_ENV,
    STOP_FILE,
    RankReport,
    cause,
    read_reports,
    report_of_death,
)

SAVE_TIMEOUT_S = 600.0
# A batch system may send the same signal twice at once; only a later Ctrl-C is a second wish.
_SECOND_WISH_S = 0.5


def launch(argv: Sequence[str], nproc: int, *, debug: bool = False) -> RankReport:
    """Run ``isthmus <argv>`` as ``nproc`` ranks and wait for all of them.

    SIGTERM, a hang-up and Ctrl-C reach the ranks, which save and leave (75); a second Ctrl-C kills them (130).

    Args:
        argv: the words after ``isthmus``.
        nproc: ranks.
        debug: let all ranks and elastic itself print; else only rank 0 does.

    Returns:
        The report of the rank that decided the end, not printed yet; exit code 0 if all went well.

    Raises:
        Preempted: asked to stop before any rank was started.
    """
    with tempfile.TemporaryDirectory(prefix="isthmus-ranks-") as name:
        folder = Path(name)
        with _environment(_rank_environment(folder, nproc)), _Signals(folder) as signals:
            deaths = _run_agent(argv, nproc, folder, signals, debug=debug)
        if signals.killed:
            return RankReport(rank=0, exit_code=130, message="killed; what was not saved is lost.")
        reports = read_reports(folder)
        end = cause(reports, deaths)
        if end is None and signals.stop_requested and len(reports) < nproc:
            end = RankReport(rank=0, exit_code=PREEMPTED, message="stopped before training began, as asked.")
        return end or RankReport(rank=0, exit_code=0)


def _run_agent(
    argv: Sequence[str], nproc: int, folder: Path, signals: _Signals, *, debug: bool
) -> dict[int, RankReport]:
    """Start the ranks and wait for all of them; returns those that failed, as seen from outside."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if not debug:
        _quiet_elastic()
    # What the other ranks print repeats the first one's. It is kept until the end, for a rank that dies unheard.
    redirects = {} if debug else {rank: Std.ALL for rank in range(1, nproc)}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        role="isthmus",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=redirects),
        signals_to_handle="",
    )
    signals.ranks_start()
    try:
        # Elastic replaces ${local_rank} in arguments; a path or a setting of the user is not for it to read.
        elastic_launch(config, sys.executable)("-P", "-m", "isthmus", *(word.replace("$", "$$") for word in argv))
    except ChildFailedError as error:
        return {
            rank: report_of_death(
                rank,
                failure.exitcode,
                # In whole seconds and noticed late: put it before the echoes that the death itself set off.
                time_s=failure.timestamp - 1.0,
                last_words=_last_words(folder, failure.local_rank),
            )
            for rank, failure in error.failures.items()
        }
    return {}


class _Signals:
    """Passes a request to stop on to the ranks, for as long as it is entered."""

    def __init__(self, folder: Path) -> None:
        import psutil

        self._this_process = psutil.Process()
        self._not_ours = {child.pid for child in self._this_process.children()}
        self._stop_file = folder / STOP_FILE
        self._ranks_started = False
        self._first_s: float | None = None
        self._previous: list[tuple[signal.Signals, object]] = []
        self._timer: threading.Timer | None = None
        self.killed = False

    @property
    def stop_requested(self) -> bool:
        return self._first_s is not None

    def ranks_start(self) -> None:
        self._ranks_started = True

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue  # nohup
                self._previous.append((number, signal.signal(number, self._received)))
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous:
            signal.signal(number, handler)  # type: ignore[arg-type]
        if self._timer:
            self._timer.cancel()
        # Whatever interrupted this process, no rank outlives it.
        self._send(signal.SIGKILL)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if not self._ranks_started:
            raise Preempted("stopped before any rank was started, as asked.")
        now_s = time.monotonic()
        if self._first_s is None:
            self._first_s = now_s
            self._stop_file.touch()  # for a rank that does not listen yet
            self._send(signal.SIGTERM)
            self._timer = threading.Timer(SAVE_TIMEOUT_S, self._send, (signal.SIGKILL,))
            self._timer.daemon = True
            self._timer.start()
            hint = "" if number != signal.SIGINT else " Ctrl-C again kills the run."
            os.write(2, f"isthmus: {signal.Signals(number).name}: saving after this step.{hint}\n".encode())
        elif number == signal.SIGINT and now_s - self._first_s > _SECOND_WISH_S:
            self.killed = True
            self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        for child in self._this_process.children():
            try:
                # Elastic gives each rank a session of its own.
                if child.pid in self._not_ours or os.getpgid(child.pid) != child.pid:
                    continue
                if number == signal.SIGKILL:
                    os.killpg(child.pid, number)
                else:
                    os.kill(child.pid, number)
            except (ProcessLookupError, PermissionError):
                continue


def _rank_environment(folder: Path, nproc: int) -> dict[str, str]:
    root = Path(isthmus.__file__).parents[1]
    environment = {
        REPORTS_ENV: str(folder),
        # Ranks that each take all cores get in one another's way.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // nproc))),
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "",
        # Once a rank has failed; the others leave by themselves (see peers), unless one is stopped or stuck.
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5",
    }
    if root.name not in ("site-packages", "dist-packages"):
        path = os.environ.get("PYTHONPATH")
        environment["PYTHONPATH"] = str(root) + (os.pathsep + path if path else "")
    return environment


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _quiet_elastic() -> None:
    """Elastic reports every failure at length; the user hears of it from us."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def _last_words(folder: Path, local_rank: int) -> str:
    """The last line that a rank printed to stderr, as far as it was kept."""
    for path in folder.glob(f"*/attempt_*/{local_rank}/stderr.log"):
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""
