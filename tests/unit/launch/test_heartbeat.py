from __future__ import annotations

import errno
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from free_port import free_port
from isthmus.engine.parallel import process_groups
from isthmus.errors import DataError, IsthmusError, UsageError
from isthmus.launch import heartbeat, machine_agent
from isthmus.launch.first_failure import Failure, first_failure, posted_failure, reported_failures
from isthmus.launch.heartbeat import Heartbeat
from isthmus.launch.machine_agent import MachineMembers
from isthmus.launch.machine_folder import FINISHED, MachineFolder
from isthmus.platforms.cpu import CpuPlatform
from isthmus.platforms.cuda import CudaPlatform

HOST = re.escape(socket.gethostname())

TWO_RANKS = MachineMembers(agents=1, index=0, nonces={"0": "", "1": ""})


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.Store]:
    """The store of two ranks; this process is rank 0 and an agent of torchrun serves the store."""
    monkeypatch.setattr(heartbeat, "_PERIOD_S", 0.05)
    monkeypatch.setattr(machine_agent, "_RELAY_S", 0.02)
    monkeypatch.setattr(heartbeat, "GRACE_S", 0.3)
    monkeypatch.setattr(Heartbeat, "first", None)
    port = free_port()
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=True, wait_for_workers=False)
    variables = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    for name, value in (variables | {"TORCHELASTIC_USE_AGENT_STORE": "True"}).items():
        monkeypatch.setenv(name, value)
    yield dist.PrefixStore("attempt_0", store)


@pytest.fixture
def other(tmp_path: Path) -> MachineFolder:
    """Rank 1 on the machine of rank 0."""
    return MachineFolder(tmp_path, agent=0, rank=1, is_shared=True)


@pytest.fixture
def folder(tmp_path: Path, store: dist.Store) -> MachineFolder:
    return MachineFolder(tmp_path, agent=0, is_shared=True)


def test_failure_of_the_block_is_posted(store: dist.Store, folder: MachineFolder) -> None:
    with pytest.raises(DataError), Heartbeat(5.0, folder) as heart:
        heart.start(TWO_RANKS)
        raise DataError("bad.")
    posted = posted_failure(store)
    assert posted is not None and (posted.rank, posted.exit_code, posted.message) == (0, 65, "bad.")
    assert Heartbeat.first == posted == folder.failure()


def test_lost_connection_becomes_the_failure_of_the_other_rank(
    store: dist.Store, folder: MachineFolder, other: MachineFolder
) -> None:
    first = Failure(rank=1, exit_code=79, message="loss is nan.", machine=["node1", "10.0.0.1"])
    with pytest.raises(IsthmusError, match="loss is nan") as caught, Heartbeat(5.0, folder) as heart:
        heart.start(TWO_RANKS)
        first.post(store)
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1234")
    assert caught.value.exit_code == 79 and Heartbeat.first == first


@pytest.mark.slow
def test_silent_rank_is_named_with_its_trace_region(
    store: dist.Store, folder: MachineFolder, other: MachineFolder
) -> None:
    other.beat("step 3: optimizer")
    with pytest.raises(IsthmusError, match=f"no heartbeat any more of rank 1 on {HOST}, last in step 3: optimizer"):
        with Heartbeat(5.0, folder) as heart:
            heart.start(TWO_RANKS)
            raise RuntimeError("gloo: timed out")


def test_rank_whose_process_has_ended_is_named_at_once(
    store: dist.Store, folder: MachineFolder, other: MachineFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures: list[Failure] = []
    monkeypatch.setattr(heartbeat, "_leave", failures.append)
    other.beat("step 3: optimizer")
    with Heartbeat(600.0, folder) as heart:
        heart.start(TWO_RANKS)
        other._unlock()  # as the kernel does it
        ended_s = time.monotonic()
        while (posted := posted_failure(store)) is None and time.monotonic() - ended_s < 30.0:
            time.sleep(0.01)
    assert posted is not None and f"rank 1 on {HOST}, last in step 3: optimizer" in posted.message


@pytest.mark.slow
def test_rank_that_has_finished_is_not_lost(store: dist.Store, folder: MachineFolder, other: MachineFolder) -> None:
    with Heartbeat(0.2, folder) as heart:
        other.leave()
        heart.start(TWO_RANKS)
        time.sleep(0.6)
    assert posted_failure(store) is None and FINISHED in folder.heartbeat(0).regions


@pytest.mark.slow
def test_lost_rank_is_noticed_before_the_limit_of_collectives(
    store: dist.Store, folder: MachineFolder, other: MachineFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert heartbeat.LOST_S == 90.0
    monkeypatch.setattr(heartbeat, "LOST_S", 1.0)  # on a loaded machine the store answers late
    failures: list[Failure] = []
    monkeypatch.setattr(heartbeat, "_leave", failures.append)
    other.beat("checkpoint")
    started_s = time.monotonic()
    with Heartbeat(600.0, folder) as heart:
        heart.start(TWO_RANKS)
        while not failures and time.monotonic() - started_s < 30.0:
            time.sleep(0.05)
    assert failures[0].exit_code == 76 and f"rank 1 on {HOST}, last in checkpoint" in failures[0].message


@pytest.mark.parametrize("timeout_s", [5.0, 90.0, 600.0])
def test_nccl_waits_longer_than_the_heartbeat(timeout_s: float) -> None:
    nccl, gloo = (
        process_groups._limit(kind(reason=""), timeout_s).total_seconds() for kind in (CudaPlatform, CpuPlatform)
    )
    assert nccl > min(timeout_s, heartbeat.LOST_S) + 2 * heartbeat.GRACE_S and gloo == timeout_s


@pytest.mark.slow
def test_other_ranks_are_not_lost_after_this_process_was_stopped(
    store: dist.Store, folder: MachineFolder, other: MachineFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As all ranks of a job that the batch system suspends."""
    other.beat("checkpoint")
    times_s = iter([1.0, 1.1, 1.1, 500.0, 500.0, 500.1, 500.1])
    heart = Heartbeat(600.0, folder)
    heart._watched = [1]
    monkeypatch.setattr(heart._agent, "answers", 0)
    failures: list[Failure] = []
    monkeypatch.setattr(heartbeat, "_leave", failures.append)

    def monotonic() -> float:
        if (now_s := next(times_s, None)) is None:
            heart._ended.set()
        return now_s or 500.2

    monkeypatch.setattr(heartbeat.time, "monotonic", monotonic)
    heart._run()
    assert not failures and posted_failure(store) is None and folder.heartbeat(0).count >= 3


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ValueError("mine"), 70, "ValueError: mine"),
        (PermissionError(errno.EACCES, "Permission denied", "m"), 74, "m: Permission denied."),
        (OSError(errno.ENOSPC, "No space left on device", "m"), 73, "m: no space is left."),
    ],
)
def test_other_errors_are_posted_with_the_exit_code_of_the_rank(
    store: dist.Store, folder: MachineFolder, error: Exception, code: int, message: str
) -> None:
    with pytest.raises(type(error)), Heartbeat(5.0, folder):
        raise error
    posted = posted_failure(store)
    assert posted is not None and posted.exit_code == code and posted.message.startswith(message)


def test_failure_that_was_read_counts_after_the_store_has_ended(store: dist.Store, folder: MachineFolder) -> None:
    first = Failure(rank=1, exit_code=65, message="bad data.", machine=["node1", "10.0.0.1"])
    with pytest.raises(IsthmusError, match="bad data") as caught, Heartbeat(5.0, folder) as heart:
        heart.start(TWO_RANKS)
        first.post(store)
        while folder.failure() is None:
            time.sleep(0.01)
        heart._agent._store = dist.HashStore()  # type: ignore[union-attr]
        raise RuntimeError("Connection reset by peer")
    assert caught.value.exit_code == 65


def test_leaving_rank_writes_its_own_error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher assumes that a rank without an error file died, and prints the earliest failure."""
    path = tmp_path / "run" / "attempt_0" / "1" / "error.json"
    path.parent.mkdir(parents=True)
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_ERROR_FILE": str(path)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(heartbeat.os, "_exit", lambda code: codes.append(code))
    codes: list[int] = []
    cause = Failure(rank=0, exit_code=74, message="disk", time_s=1.0)
    heartbeat._leave(cause)
    (reported,) = reported_failures(tmp_path)
    assert (reported.rank, reported.exit_code, reported.message, codes) == (1, 74, "disk", [74])
    assert first_failure([reported, cause]) == cause


@pytest.mark.parametrize(
    ("ranks", "local_ranks", "soft", "hard", "new"),
    [(64, 8, 1024, 4096, None), (16384, 8, 1024, 65536, 18944), (16384, 8, 1024, -1, 18944), (16384, 8, -1, -1, None)],
)
def test_store_has_an_open_file_for_each_connection(
    monkeypatch: pytest.MonkeyPatch, ranks: int, local_ranks: int, soft: int, hard: int, new: int | None
) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(heartbeat.resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(heartbeat.resource, "setrlimit", lambda _, pair: limits.append(pair))
    heartbeat._allow_connections(ranks, local_ranks)
    assert limits == ([] if new is None else [(new, hard)])
    with pytest.raises(UsageError, match=r"to 100000 ranks and needs 113012 open files; its limit is 65536"):
        monkeypatch.setattr(heartbeat.resource, "getrlimit", lambda _: (1024, 65536))
        heartbeat._allow_connections(100000, 8)
