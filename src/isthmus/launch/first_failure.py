"""The failures of ranks: the first one is the cause of a failed run and is printed once.

Ranks report to the rendezvous store, where the first entry wins, and to the error file of torch elastic, which
``--nproc`` reads after all ranks have ended.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from isthmus.errors import Hang, IOFailure, IsthmusError, Preempted, UnsafeInput, error_of
from isthmus.files.atomic_write import write_atomic
from isthmus.launch.run_token import sealed, unsealed
from isthmus.platforms import rank_env
from isthmus.platforms.network_interfaces import route_to

if TYPE_CHECKING:
    from torch.distributed import Store

MEMBERS = "rendezvous/members"
"""Store key that ranks wait for during the rendezvous; a failure sets it too."""
ALARM = "alarm"
"""Store key with a number above 0 once a rank has failed or a collective was lost."""
_FAILURE = "failure"
_SECONDARY = (IsthmusError.exit_code, IOFailure.exit_code, Hang.exit_code)
"""Exit codes that the failure of another rank may cause."""
_write_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """The failure of one rank; by default this one."""

    exit_code: int
    message: str = ""
    traceback: str = ""
    rank: int = field(default_factory=rank_env.rank)
    machine: list[str] = field(default_factory=lambda: this_machine())
    """Host name, and the address with which it reaches rank 0; equal on ranks of the same machine."""
    reported: bool = True
    """Whether the rank reported it itself."""
    time_s: float = field(default_factory=time.time)
    """Unix time."""

    @property
    def error(self) -> IsthmusError:
        """An exception for the other ranks that end because of this failure."""
        return error_of(self.exit_code, self.message)

    def line(self) -> str:
        """The line that this rank prints; empty unless it failed itself or is the first rank of another machine."""
        if not self.message:  # a closed pipe, for example
            return ""
        if self.rank == rank_env.rank():
            return f"rank {self.rank}: {self.message}"
        if rank_env.local_rank() or self.machine == this_machine():
            return ""
        return f"rank {self.rank} on {self.machine[0]}: {self.message}"

    def write(self) -> None:
        """Write the error file of torch elastic, if this process has one; the first failure of the process counts."""
        if (path := rank_env.error_file()) is None:
            return
        details = {"py_callstack": self.traceback or self.message, "timestamp": str(int(self.time_s))}
        message = {"message": self.message, "errorCode": self.exit_code, "extraInfo": details}
        # The main thread and the heartbeat may write at the same time. The launcher may have removed the folder.
        with _write_lock, suppress(IsthmusError):
            if not path.exists():
                write_atomic(path, json.dumps({"message": message, "isthmus": asdict(self)}))

    def post(self, store: Store) -> Failure:
        """Post it to the store; returns the first failure of the run."""
        first = store.compare_set(_FAILURE, "", sealed(_FAILURE, json.dumps(asdict(self))))
        store.compare_set(MEMBERS, "", sealed(MEMBERS, "[]"))
        store.add(ALARM, 1)
        with suppress(UnsafeInput):  # that is no failure of a rank
            return Failure(**json.loads(unsealed(_FAILURE, first)))
        return self


def posted_failure(store: Store) -> Failure | None:
    """The first failure that a rank has posted; UnsafeInput if another process posted it."""
    return Failure(**json.loads(unsealed(_FAILURE, store.get(_FAILURE)))) if store.check([_FAILURE]) else None


def reported_failures(folder: Path) -> list[Failure]:
    """The failures in the error files of a torch elastic log folder."""
    files = folder.glob("*/attempt_*/*/error.json")
    return [Failure(**json.loads(path.read_text(encoding="utf-8"))["isthmus"]) for path in files]


def failure_of_death(rank: int, exit_code: int, *, time_s: float, last_line: str = "") -> Failure:
    """The failure of a rank that reported none; ``exit_code`` is -N for signal N, as in subprocess."""
    ending, hint = f"ended with exit code {exit_code} and reported no error.", ""
    if exit_code < 0:
        name = signal.Signals(-exit_code).name if -exit_code in set(signal.Signals) else "a signal"
        ending = f"was ended by {name} (signal {-exit_code})."
        if name == "SIGKILL":
            hint = " The system may have run out of memory: lower train.micro_batch_size."
        elif name == "SIGABRT":
            hint = " NCCL does so if another rank does not answer for parallel.timeout_s; --debug shows its log."
    printed = f" Its last output: {last_line}" if last_line else ""
    return Failure(
        rank=rank,
        exit_code=exit_code if exit_code >= 0 else 128 - exit_code,
        message=f"rank {rank} {ending}{hint}{printed}",
        reported=False,
        time_s=time_s,
    )


def first_failure(failures: Iterable[Failure]) -> Failure | None:
    """The earliest reported error that no other rank can cause, else other error, SIGTERM or stop request."""

    def order(failure: Failure) -> tuple[int, float]:
        if failure.exit_code == Preempted.exit_code:
            return 3, failure.time_s
        if not failure.reported and failure.exit_code == 128 + signal.SIGTERM:
            return 2, failure.time_s  # torch elastic ends the other ranks so; they handle it only once they train
        return int(failure.exit_code in _SECONDARY or not failure.reported), failure.time_s

    return min(failures, key=order, default=None)


def this_machine() -> list[str]:
    """Host name, and the address with which this machine reaches rank 0."""
    with suppress(IsthmusError):
        if route := route_to(rank_env.master()[0]):
            return [socket.gethostname(), route.address]
    return [socket.gethostname(), ""]
