"""Starts the ranks of ``--nproc`` with torch elastic, in this process.

The children run the same command line with the environment of a rank. A signal to this process is forwarded to them;
they save and exit.
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

import isthmus
from isthmus.errors import Preempted
from isthmus.launch.first_failure import Failure, failure_of_death, first_failure, reported_failures
from isthmus.platforms import rank_env
from isthmus.platforms.cpu_threads import cores
from isthmus.platforms.network_interfaces import GLOO, NCCL, loopback
from isthmus.train.stop import SECOND_REQUEST_S, answer_signal, end_of_bar

SAVE_TIMEOUT_S = 600.0
"""Time for the ranks to save after a stop request."""
LEAVE_TIMEOUT_S = 5
"""Time for the other ranks to exit after a failure."""
# ``python -P -m isthmus``, which Python 3.10 does not have: modules in the current folder do not hide others.
_RANK_COMMAND = (
    "-c",
    "import sys; sys.path = [*filter(None, sys.path)]; from isthmus.cli.main import main; sys.exit(main())",
)


def launch(argv: Sequence[str], nproc: int, *, debug: bool = False, script: bool = False) -> Failure | None:
    """Run ``isthmus <argv>`` as ``nproc`` ranks and wait for them; returns the first failure, which is not printed yet.

    SIGTERM, SIGHUP and Ctrl-C reach the ranks, which save and exit (75); a second Ctrl-C kills them (130). Preempted is
    raised only before any rank has started. With ``debug``, all ranks and torch elastic print; otherwise only rank 0.
    With ``script``, they run foreign code, which handles signals itself (143 by default), and all of them print.
    """
    with tempfile.TemporaryDirectory(prefix="isthmus-ranks-") as name:
        folder = Path(name)
        with _environment(_rank_environment(folder, nproc)), _Signals(folder / "stop", saves=not script) as signals:
            deaths = _run_agent(argv, nproc, folder, signals, debug=debug, script=script)
        if signals.killed:
            return Failure(exit_code=130, message="killed; unsaved progress is lost.")
        reported = reported_failures(folder)
        ranks = {failure.rank for failure in reported}
        first = first_failure([*reported, *(failure for failure in deaths if failure.rank not in ranks)])
        if first and not first.reported and first.exit_code == 128 + signal.SIGTERM and signals.stop_requested:
            if script:
                return Failure(exit_code=first.exit_code, message="stopped by a signal, as requested.")
            return Failure(exit_code=Preempted.exit_code, message="stopped before training began, as requested.")
        return first


def exit_with_parent() -> None:
    """Let the kernel send SIGTERM to this rank when its parent process dies."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, int(signal.SIGTERM))  # PR_SET_PDEATHSIG of prctl(2)


def _run_agent(
    argv: Sequence[str], nproc: int, folder: Path, signals: _Signals, *, debug: bool, script: bool
) -> list[Failure]:
    """Start the ranks and wait for them; returns the failures by their exit codes."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, PContext, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from isthmus.launch.local_rendezvous import register

    # Elastic kills the other ranks 30 s after one has failed, and has no setting for it.
    PContext.close.__defaults__ = (None, LEAVE_TIMEOUT_S)
    if not debug:  # elastic logs every failure; the launcher prints one
        for name in list(logging.root.manager.loggerDict):
            if name.startswith("torch.distributed.elastic"):
                logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    # The other ranks print the same as rank 0; their last line explains a death without a report.
    redirects = {} if debug or script else {rank: Std.ALL for rank in range(1, nproc)}
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        role="isthmus",
        rdzv_backend=register(),
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder), redirects=redirects),
    )
    # Elastic replaces ${local_rank} in arguments.
    launcher, words = elastic_launch(config, sys.executable), [word.replace("$", "$$") for word in argv]
    signals.ranks_started = True
    try:
        # Elastic replaces signal handlers only in the main thread, which handles signals while it waits.
        with ThreadPoolExecutor(1) as thread:
            thread.submit(launcher, *_RANK_COMMAND, *words).result()
    except ChildFailedError as error:
        # Elastic rounds to seconds and notices late; 1 s earlier is before the failures that the death caused.
        return [
            failure_of_death(
                rank, death.exitcode, time_s=death.timestamp - 1.0, last_line=_last_line(folder, death.local_rank)
            )
            for rank, death in error.failures.items()
        ]
    return []


class _Signals:
    """Forwards stop requests to the ranks; kills the remaining ranks when the block ends."""

    def __init__(self, stop_file: Path, *, saves: bool) -> None:
        self._process = psutil.Process()
        self._other_children = {child.pid for child in self._process.children()}
        self._stop_file = stop_file
        self._saves = saves
        self._first_request = threading.Lock()
        self._first_s = math.inf
        self._previous: dict[int, object] = {}
        self._timer = threading.Timer(SAVE_TIMEOUT_S, self._send, (signal.SIGKILL,))
        self._timer.daemon = True
        self.ranks_started = self.stop_requested = self.killed = False

    def __enter__(self) -> _Signals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
                    self._previous[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._timer.cancel()
        self._send(signal.SIGKILL)
        # A busy kernel takes a while to end a process.
        psutil.wait_procs([child for child in self._process.children() if self._is_rank(child)], timeout=30.0)

    def _received(self, number: int, frame: FrameType | None) -> None:
        if not self.ranks_started:
            raise Preempted("stopped before any rank was started, as requested.")
        if self._first_request.acquire(blocking=False):  # a second signal may interrupt this handler
            self.stop_requested, self._first_s = True, time.monotonic()
            self._stop_file.touch()  # for a rank that has no signal handler yet
            self._send(signal.SIGTERM)
            self._timer.start()
            answer_signal(number, "saving after this step" if self._saves else "sent to the ranks")
        elif number == signal.SIGINT and time.monotonic() - self._first_s > SECOND_REQUEST_S:
            self.killed = True
            self._send(signal.SIGKILL)
            os.write(2, end_of_bar().encode())

    def _send(self, number: signal.Signals) -> None:
        for child in self._process.children():
            try:
                if self._is_rank(child):
                    (os.killpg if number == signal.SIGKILL else os.kill)(child.pid, number)
            except (ProcessLookupError, PermissionError):
                continue

    def _is_rank(self, child: psutil.Process) -> bool:
        """Elastic starts each rank in its own session."""
        try:
            return child.pid not in self._other_children and os.getpgid(child.pid) == child.pid
        except (ProcessLookupError, PermissionError):
            return False


def _rank_environment(folder: Path, nproc: int) -> dict[str, str]:
    environment = {
        rank_env.STOP_FILE: str(folder / "stop"),
        rank_env.STORE_FILE: str(folder / "store"),
        # Avoids oversubscribed cores.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // nproc))),
    }
    if interface := loopback():  # collectives listen on all addresses of the host name, or on an interface of a cluster
        environment |= {GLOO: interface.name, NCCL: f"={interface.name}"}
    root = Path(isthmus.__file__).parents[1]
    if root.name not in ("site-packages", "dist-packages"):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    return environment


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _last_line(folder: Path, local_rank: int) -> str:
    """The last line that a rank printed to stderr, if that was redirected."""
    for path in folder.glob(f"*/attempt_*/{local_rank}/stderr.log"):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        return next((line.strip() for line in reversed(lines) if line.strip()), "")
    return ""
