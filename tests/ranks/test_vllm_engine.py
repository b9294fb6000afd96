"""Rollouts by a server: every rank gets the answers, or the error, of rank 0."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ranks.rank_pool import RankPool
from unit.recipes.rollout.fake_vllm import FakeVllm
from unit.recipes.rollout.group_vllm import GroupVllm, engine_module

ROLLOUT = "ranks.vllm_tasks.rollout"


@pytest.fixture
def server() -> Iterator[FakeVllm]:
    server = FakeVllm()
    yield server
    server.close()


def test_all_ranks_get_the_answers(server: FakeVllm, two_ranks: RankPool, tmp_path: Path) -> None:
    first, second = two_ranks.run(ROLLOUT, url=server.url, folder=tmp_path)
    assert first == second == [[[6, 7, 7], [-1.0] * 3], [[9, 7, 7], [-1.0] * 3]]
    assert len(server.bodies) == 2


def test_all_ranks_end_if_the_server_dies(server: FakeVllm, two_ranks: RankPool, tmp_path: Path) -> None:
    server.dies_after = 1
    first, second = two_ranks.run(ROLLOUT, url=server.url, folder=tmp_path)
    assert first == second and first[0] == 76 and server.url in first[1]


def test_tensors_of_all_ranks_reach_workers_through_a_process_group(two_ranks: RankPool, tmp_path: Path) -> None:
    with engine_module() as module:
        server = GroupVllm(module)
        first, second = two_ranks.run(ROLLOUT, url=server.url, folder=tmp_path, transfer="group")
        server.close()
    assert first == second == [[[6, 7, 7], [-1.0] * 3], [[9, 7, 7], [-1.0] * 3]]
    for model in server.models:
        assert [float(tensor.mean()) for tensor in model.values.values()] == [0, 2, 4]


def test_all_ranks_end_if_the_server_fails_in_a_transfer(two_ranks: RankPool, tmp_path: Path) -> None:
    with engine_module() as module:
        server = GroupVllm(module)
        server.fails_at = "/update_weights"
        first, second = two_ranks.run(ROLLOUT, url=server.url, folder=tmp_path, transfer="group")
        server.close()
    assert first == second and first[0] == 76 and server.url in first[1]
