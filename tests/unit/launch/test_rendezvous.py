from __future__ import annotations

from isthmus.launch.rendezvous import Member, by_machine, rank_ranges


def test_consecutive_ranks_are_named_as_a_range() -> None:
    assert rank_ranges([3]) == "rank 3"
    assert rank_ranges([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    assert rank_ranges([9, 10, 11]) == "ranks 9-11"


def test_ranks_are_listed_by_machine() -> None:
    members = [
        Member(rank=rank, world_size=4, machine=[f"node{rank // 2}", f"10.0.0.{rank // 2}"], listeners=[])
        for rank in range(4)
    ]
    assert by_machine(members) == "ranks 0-1 on node0 (10.0.0.0), ranks 2-3 on node1 (10.0.0.1)"
