"""What ranks write into a store is sealed with the token of the run."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist

from isthmus.errors import UnsafeInput, UsageError
from isthmus.launch import heartbeat
from isthmus.launch.first_failure import Failure, posted_failure
from isthmus.launch.run_token import check_ranks, sealed, unsealed
from isthmus.platforms.cpu import CpuPlatform
from isthmus.platforms.network_interfaces import Interface
from isthmus.platforms.rank_env import RUN_TOKEN

TOKEN = "0123456789abcdef"


def test_a_value_has_the_seal_of_the_token_and_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    assert unsealed("a", sealed("a", "[1]").encode()) == "[1]"
    monkeypatch.setenv(RUN_TOKEN, TOKEN)
    value = sealed("a", "[1]")
    assert unsealed("a", value.encode()) == "[1]" and TOKEN not in value
    for key, wrong in {"a": "[1]", "b": value}.items():
        with pytest.raises(UnsafeInput, match=f"a value \\({key}\\) of a process with another token, or none"):
            unsealed(key, wrong)
    with pytest.raises(UnsafeInput):
        unsealed("a", value.replace("[1]", "[2]"))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(UnsafeInput):  # of the attempt before
        unsealed("a", value)
    monkeypatch.delenv(RUN_TOKEN)
    with pytest.raises(UnsafeInput, match="with a token, and this rank has none"):
        unsealed("a", value)
    monkeypatch.setenv(RUN_TOKEN, "short")
    with pytest.raises(UsageError, match="has 5 characters, expected 16 or more"):
        sealed("a", "")


def test_a_failure_that_no_rank_posted_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    store = dist.HashStore()
    Failure(exit_code=2, message="of a stranger", machine=["x", ""]).post(store)
    monkeypatch.setenv(RUN_TOKEN, TOKEN)
    with pytest.raises(UnsafeInput):
        posted_failure(store)
    assert Failure(exit_code=65, message="of a rank", machine=["x", ""]).post(store).exit_code == 65


def test_a_rank_that_proves_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    first: list[torch.Tensor] = []

    def gather(parts: list[torch.Tensor], part: torch.Tensor) -> None:
        first.append(part)
        parts[0].copy_(part)
        parts[1].copy_(part)  # of rank 0, which the other process has seen

    monkeypatch.setattr(dist, "all_gather", gather)
    with pytest.raises(UnsafeInput, match="rank 1 has not the token of this run"):
        check_ranks(TOKEN, CpuPlatform("test"), b"members")
    with pytest.raises(UnsafeInput):
        check_ranks(TOKEN, CpuPlatform("test"), b"members of another run")
    assert not torch.equal(*first)


@pytest.mark.parametrize(
    ("host", "chosen", "address"),
    [
        ("127.0.0.1", None, "127.0.0.1"),
        ("node", None, None),
        ("node", "127.0.0.1", "127.0.0.1"),
        ("node", "127.0.0.2", None),
    ],
)
def test_store_listens_at_a_known_address_only(
    host: str, chosen: str | None, address: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    answers = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers)
    monkeypatch.setattr(heartbeat, "named_by", lambda name: None if chosen is None else Interface("eth0", chosen))
    listener = heartbeat._listener(host, 0)
    assert (None if listener is None else listener.getsockname()[0]) == address
    if listener is not None:
        assert heartbeat._listener(host, listener.getsockname()[1]) is None  # torch shares the store of this process
        listener.close()
