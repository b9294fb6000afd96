from __future__ import annotations

from isthmus.engine.parallel.rendezvous import Member, said, spans


def test_ranks_are_named_in_few_words() -> None:
    assert spans([3]) == "rank 3"
    assert spans([0, 1, 2, 5, 7, 8]) == "ranks 0-2, 5, 7-8"
    assert spans([9, 10, 11]) == "ranks 9-11"


def test_who_is_where() -> None:
    members = [
        Member(rank=rank, world_size=4, host=f"node{rank // 2}", address=f"10.0.0.{rank // 2}", doors=[])
        for rank in range(4)
    ]
    assert said(members) == "ranks 0-1 on node0 (10.0.0.0), ranks 2-3 on node1 (10.0.0.1)"
    assert said([]) == "none"
