"""The folder in which the ranks of a run on one machine exchange members, heartbeats and failures.

Files need no server and no port, and keep nobody waiting: a rank that is suspended or dead does not block the others.
Only this user may open the folder. One rank, the machine agent, passes its contents on to the rendezvous store
(`machine_agent.py`).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import stat
import tempfile
import threading
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch.distributed as dist

from isthmus.errors import UnsafeInput, UsageError
from isthmus.launch.first_failure import Failure, this_machine
from isthmus.launch.run_token import sealed, unsealed
from isthmus.platforms import rank_env

FINISHED = "finished"
LEAVING = "leaving, because another rank does not answer"
_locks: set[int] = set()
"""Locks of this process; a forked child would keep them after its end."""


@dataclass(frozen=True, slots=True)
class Beat:
    """The last heartbeat of a rank, or of all ranks of a machine."""

    host: str
    count: int
    regions: dict[str, list[int]]
    """The ranks in each trace region."""

    @property
    def has_left(self) -> bool:
        return all(region == FINISHED or LEAVING in region for region in self.regions)

    def dumps(self) -> str:
        return json.dumps([self.host, self.count, self.regions])


def loads(text: str) -> Beat:
    return Beat(*json.loads(text))


def described(beats: Iterable[Beat], *, machines: int = 4) -> str:
    """``rank 1 on node0, last in step 3: data; ranks 0, 2-7 on node0, last in step 3: optimizer``: few ranks first.

    A region with ranks of more than ``machines`` machines has no host names.
    """
    regions: dict[str, list[tuple[str, list[int]]]] = {}
    for beat in beats:
        for region, ranks in beat.regions.items():
            regions.setdefault(region, []).append((beat.host, ranks))
    texts = []
    for region, places in sorted(regions.items(), key=lambda item: sum(len(ranks) for _, ranks in item[1])):
        if len(places) > machines:
            everyone = sorted(rank for _, ranks in places for rank in ranks)
            text = f"{rank_ranges(everyone)} on {len(places)} machines"
        else:
            text = ", ".join(f"{rank_ranges(ranks)} on {host}" for host, ranks in places)
        texts.append(f"{text}, last in {region or 'between steps'}")
    return "; ".join(texts)


def rank_ranges(ranks: Sequence[int]) -> str:
    """``rank 3``, ``ranks 0-2, 5``."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and rank - 1 == ranges[-1][1]:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(texts)}"


class MachineFolder:
    """The files of the ranks of this machine; while a rank lives, it holds a lock on one of them."""

    def __init__(self, path: Path, *, agent: int, rank: int | None = None, is_shared: bool = False) -> None:
        """``agent`` is the rank of the machine agent. A folder that ``is_shared`` is removed by its owner.

        Raises:
            UsageError: another process has the same rank.
        """
        self.path = path
        self.agent = agent
        self._is_shared = is_shared
        self.rank: int = rank_env.rank() if rank is None else rank
        self._count = 0
        self._lock: int | None = os.open(path / f"lock-{self.rank}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        _locks.add(self._lock)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._unlock()
            raise UsageError(
                f"another process has RANK={self.rank} already. Give every process its own RANK."
            ) from error
        except OSError:  # a file system without locks: only heartbeats are watched
            pass

    @property
    def is_agent(self) -> bool:
        return self.rank == self.agent

    def write(self, name: str, text: str = "") -> None:
        """Replace a file; does nothing when the folder was removed or the disk is full."""
        with suppress(OSError):
            self._new_file(name, text).replace(self.path / name)

    def read(self, name: str) -> str | None:
        """The content of a file; None if it does not exist."""
        with suppress(OSError):
            return (self.path / name).read_text(encoding="utf-8")
        return None

    def ranks_with(self, prefix: str) -> list[int]:
        """The ranks that have written ``prefix-RANK``."""
        names: list[str] = []
        with suppress(OSError):
            names = os.listdir(self.path)
        return sorted(int(name.removeprefix(f"{prefix}-")) for name in names if name.startswith(f"{prefix}-"))

    def beat(self, region: str) -> None:
        """Send the heartbeat of this rank."""
        self._count += 1
        self.write(f"heartbeat-{self.rank}", Beat(socket.gethostname(), self._count, {region: [self.rank]}).dumps())

    def heartbeat(self, rank: int) -> Beat:
        """The last heartbeat of ``rank``."""
        text = self.read(f"heartbeat-{rank}")
        return Beat(socket.gethostname(), -1, {"the rendezvous": [rank]}) if text is None else loads(text)

    def is_alive(self, rank: int) -> bool:
        """Whether the process of ``rank`` still exists, as far as its lock shows it."""
        with suppress(OSError):
            lock = os.open(self.path / f"lock-{rank}", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
            finally:
                os.close(lock)
            return False
        return True

    def failure(self) -> Failure | None:
        """The first failure of the run that is known on this machine."""
        text = self.read("failure")
        return None if text is None else Failure(**json.loads(text))

    def post(self, failure: Failure) -> Failure:
        """Post a failure to the ranks of this machine; returns the first one."""
        with suppress(OSError):
            new = self._new_file("failure", json.dumps(asdict(failure)))
            with suppress(FileExistsError):
                os.link(new, self.path / "failure")
            new.unlink()
        return self.failure() or failure

    def leave(self) -> None:
        """End the heartbeat of this rank; the last rank removes the folder."""
        self.beat(FINISHED)
        self._unlock()
        if not self._is_shared and not any(self.is_alive(rank) for rank in self.ranks_with("lock")):
            shutil.rmtree(self.path, ignore_errors=True)

    def have_left(self, ranks: Collection[int]) -> bool:
        """Whether all of ``ranks`` have ended or finished."""
        return all(FINISHED in self.heartbeat(rank).regions or not self.is_alive(rank) for rank in ranks)

    def _new_file(self, name: str, text: str) -> Path:
        """A file with ``text`` that no other thread writes."""
        path = self.path / f".{name}-{self.rank}-{threading.get_ident()}"
        path.write_text(text, encoding="utf-8")
        return path

    def _unlock(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            _locks.discard(lock)
            os.close(lock)


def open_machine_folder(store: dist.Store) -> MachineFolder:
    """The folder of this machine, which the first of its ranks creates and announces in ``store``.

    Ranks in containers with the same address may have other temporary files: each is then a machine of its own.
    """
    if (file := rank_env.store_file()) is not None:
        path = file.with_name(f"machine-{rank_env.attempt()}")
        path.mkdir(mode=0o700, exist_ok=True)
        return MachineFolder(path, agent=0, is_shared=True)
    key = f"rendezvous/folder/{'/'.join(this_machine())}"
    new = tempfile.mkdtemp(prefix="isthmus-machine-")
    answer = store.compare_set(key, "", sealed(key, json.dumps([rank_env.rank(), new])))
    with suppress(UnsafeInput):  # of another process, which rank 0 refuses when it reads the members
        agent, announced = json.loads(unsealed(key, answer))
        if announced != new and _is_private(Path(announced)):
            os.rmdir(new)
            return MachineFolder(Path(announced), agent=agent)
    return MachineFolder(Path(new), agent=rank_env.rank())


def _is_private(folder: Path) -> bool:
    """Whether it is a folder that only this user may open."""
    with suppress(OSError):
        status = folder.lstat()
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o77
    return False


def _close_locks() -> None:
    for lock in _locks:
        os.close(lock)
    _locks.clear()


os.register_at_fork(after_in_child=_close_locks)
