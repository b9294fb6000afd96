from __future__ import annotations

import pytest

from isthmus.errors import UsageError
from isthmus.platforms import rank_env
from isthmus.platforms.rank_env import first_node, is_one_of_several_ranks


def test_alone_and_under_torchrun() -> None:
    assert not is_one_of_several_ranks({})
    assert not is_one_of_several_ranks({"RANK": "0", "WORLD_SIZE": "1"})
    torchrun = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3"}
    assert is_one_of_several_ranks(torchrun) and len(torchrun) == 3
    with pytest.raises(UsageError, match="WORLD_SIZE"):
        is_one_of_several_ranks({"RANK": "0", "WORLD_SIZE": "two"})


def test_a_task_of_slurm() -> None:
    task = {
        "SLURM_PROCID": "5", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
        "SLURM_STEP_NODELIST": "gpu[07-08]", "SLURM_JOB_ID": "123456", "SLURM_STEP_ID": "0",
    }  # fmt: skip
    other = {**task, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    assert is_one_of_several_ranks(task) and is_one_of_several_ranks(other)
    assert (task["RANK"], task["WORLD_SIZE"], task["LOCAL_RANK"], task["LOCAL_WORLD_SIZE"]) == ("5", "8", "1", "4")
    assert task["MASTER_ADDR"] == "gpu07" and task["MASTER_PORT"] == other["MASTER_PORT"]


def test_a_batch_script_of_slurm_is_no_task() -> None:
    assert not is_one_of_several_ranks({"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"})
    assert not is_one_of_several_ranks({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("n1", "n1"), ("n1,n2", "n1"), ("gpu[07-09,12],cpu1", "gpu07"), ("a[3]-ib,b", "a3-ib"), ("10.0.0.1", "10.0.0.1"),
     ("rack[1-2]n[4,6-7]", "rack1n4"), ("n[007-128]", "n007"), ("10.0.0.[1-2]", "10.0.0.1")],
)  # fmt: skip
def test_first_node(nodes: str, first: str) -> None:
    assert first_node(nodes) == first


def test_agents_that_joined_later_count_fewer_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the store of an agent, which outlives a restart, needs the count in its keys."""
    for count in ("0", "2"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
        assert rank_env.attempt() == 0
        monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
        assert rank_env.attempt() == int(count)
