"""How the number of sockets of a rank grows with the number of ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from ranks.rank_pool import RankPool


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="counts sockets in /proc, which this system lacks")
def test_groups_on_the_host_are_few_and_do_not_connect_every_pair(tmp_path: Path) -> None:
    """All pairs of 8 ranks are 7 sockets a group; Megatron-Core's further groups for the host would be 14."""
    pool = RankPool(8, tmp_path)
    try:
        result = pool.run("ranks.socket_tasks.sockets")
    finally:
        pool.close()
    assert result["run"] <= 42  # on a CPU these are groups on the host too
    assert result["save"] < 7
