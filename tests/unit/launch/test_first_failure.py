from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from isthmus.launch.first_failure import (
    Failure,
    failure_of_death,
    first_failure,
    posted_failure,
    reported_failures,
    this_machine,
)


def failed(rank: int, code: int, time_s: float) -> Failure:
    return Failure(rank=rank, exit_code=code, time_s=time_s)


def test_error_file_is_that_of_torch_elastic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    failures = [
        Failure(rank=0, exit_code=65, message="ä: bad.", time_s=1.0),
        Failure(rank=1, exit_code=70, message="ZeroDivisionError", traceback="a\nb", time_s=2.5),
    ]
    for failure in failures:
        path = tmp_path / "run" / "attempt_0" / str(failure.rank) / "error.json"
        path.parent.mkdir(parents=True)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        failure.write()
    assert sorted(reported_failures(tmp_path), key=lambda failure: failure.rank) == failures
    seen = ProcessFailure(1, 7, 70, str(path))
    assert (seen.timestamp, seen.message["message"]) == (2, "ZeroDivisionError")  # type: ignore[index]
    assert seen.message["extraInfo"]["py_callstack"] == "a\nb"  # type: ignore[index]
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone" / "error.json"))
    failures[0].write()
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    failures[0].write()


@pytest.mark.slow
def test_first_written_failure_of_a_process_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The main thread and the heartbeat may write at the same time."""
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "run" / "attempt_0" / "0" / "error.json"))
    (tmp_path / "run" / "attempt_0" / "0").mkdir(parents=True)
    written: list[Path] = []

    def slow_write(path: Path, content: str) -> None:
        assert not written, "two threads write at the same time"
        written.append(path)
        time.sleep(0.2)
        path.write_text(content)

    monkeypatch.setattr("isthmus.launch.first_failure.write_atomic", slow_write)
    first, derived = failed(0, 65, 1.0), failed(0, 76, 2.0)
    thread = threading.Thread(target=first.write)
    thread.start()
    while not written:
        time.sleep(0.01)
    derived.write()
    thread.join()
    assert reported_failures(tmp_path) == [first] and len(written) == 1


def test_first_posted_failure_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    assert posted_failure(store) is None
    first, second = Failure(rank=1, exit_code=65, message="bad data"), Failure(rank=0, exit_code=70, message="reset")
    assert first.post(store) == first and second.post(store) == first == posted_failure(store)
    error = first.error
    assert error.exit_code == 65 and str(error) == "bad data"


def test_one_rank_of_each_machine_prints_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def line(failure: Failure, rank: int, local_rank: int) -> str:
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("LOCAL_RANK", str(local_rank))
        return failure.line()

    here = Failure(rank=1, exit_code=65, message="bad.", machine=this_machine())
    assert [line(here, rank, rank) for rank in range(3)] == ["", "rank 1: bad.", ""]
    elsewhere = Failure(rank=1, exit_code=65, message="bad.", machine=["node0", "10.0.0.1"])
    assert [line(elsewhere, rank, rank - 2) for rank in (2, 3)] == ["rank 1 on node0: bad.", ""]


def test_without_failures_there_is_no_first_failure() -> None:
    assert first_failure([]) is None


def test_error_that_no_other_rank_can_cause_comes_first() -> None:
    assert first_failure([failed(0, 70, 1.0), failed(1, 65, 1.2)]) == failed(1, 65, 1.2)
    assert first_failure([failed(0, 70, 1.0), failed(1, 70, 0.9)]) == failed(1, 70, 0.9)


def test_death_comes_before_the_later_errors_that_it_caused() -> None:
    death = failure_of_death(1, -9, time_s=10.0)
    assert death.exit_code == 137
    assert first_failure([failed(0, 70, 10.3), death]) == death
    # killed by the launcher, long after the rank that failed
    assert first_failure([failed(0, 70, 10.3), failure_of_death(1, -9, time_s=40.0)]) == failed(0, 70, 10.3)


def test_error_of_a_rank_comes_before_the_sigterm_that_it_caused() -> None:
    error = Failure(rank=1, exit_code=70, message="division by zero", time_s=5.0)
    ended = failure_of_death(0, -signal.SIGTERM, time_s=4.0)
    assert first_failure([ended, error]) == error
    assert first_failure([ended]) == ended


def test_request_to_stop_counts_only_without_failures() -> None:
    assert first_failure([failed(0, 75, 1), failed(1, 75, 2)]) == failed(0, 75, 1)
    assert first_failure([failed(0, 75, 1), failed(1, 73, 2)]) == failed(1, 73, 2)


def test_message_of_a_death() -> None:
    killed = failure_of_death(2, -9, time_s=0).message
    assert "SIGKILL" in killed and "The system may have run out of memory" in killed
    assert "NCCL does so if" in failure_of_death(2, -6, time_s=0).message
    assert "SIGSEGV" in failure_of_death(2, -11, time_s=0).message
    assert "exit code 3" in failure_of_death(2, 3, time_s=0, last_line="last words").message
    assert json.loads(json.dumps(failure_of_death(2, 3, time_s=0, last_line="x").message)).endswith("x")
