"""The memory of copies of the state, and what is refused for lack of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from isthmus.config.schema import RunConfig
from isthmus.config.schema.parallel import ParallelConfig
from isthmus.errors import UsageError
from isthmus.platforms.cpu import CpuPlatform
from isthmus.recipes.plan import copies_check
from isthmus.recipes.plan.copies_check import check_copies, copies_bytes
from isthmus.recipes.plan.memory_estimate import MemoryEstimate
from isthmus.recipes.plan.model_plan import ModelPlan
from isthmus.recipes.run_dir import RunDir

GIB = 2**30


def rank(**bytes_of: int) -> MemoryEstimate:
    return MemoryEstimate(0, 0, 0, 0, 0, **bytes_of)


def plan(world_size: int, **layout: int) -> ModelPlan:
    return cast(ModelPlan, SimpleNamespace(parallel=ParallelConfig(**cast(Any, layout)), world_size=world_size))


def test_only_the_first_data_parallel_ranks_write_weights() -> None:
    saved = rank(saved_weights=10, saved_state=3)
    assert copies_bytes(plan(8), saved, ranks_here=8) == 2 * (8 * 3 + 10)  # the last copy, and the next
    assert copies_bytes(plan(16), saved, ranks_here=8) == 4 * (8 * 3 + 10)  # and those of the peer
    assert copies_bytes(plan(16, tp=4, pp=4), saved, ranks_here=8) == 4 * (8 * 3 + 8 * 10)


def check(folder: Path, saved: MemoryEstimate, monkeypatch: pytest.MonkeyPatch, *, shm: int, host: int) -> list[str]:
    config = RunConfig.model_validate(
        {
            "recipe": "sft",
            "out": str(folder / "out"),
            "model": {"path": "m"},
            "data": {"files": ["chats.json"]},
            "checkpoint": {"memory_every": 5, "memory_dir": str(folder / "shm")},
        }
    )
    monkeypatch.setattr(copies_check, "estimate_ranks", lambda *_, **__: [saved])
    monkeypatch.setattr(copies_check.shutil, "disk_usage", lambda _: SimpleNamespace(free=shm))
    monkeypatch.setattr(CpuPlatform, "free_host_bytes", lambda _: host)
    return check_copies(plan(4), config, CpuPlatform("test"), "fp32", ranks_here=2)


def test_lack_of_memory_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    saved = rank(saved_state=GIB)
    with pytest.raises(UsageError, match=r"memory_dir=.*shm is not a folder on"):
        check(tmp_path, saved, monkeypatch, shm=64 * GIB, host=64 * GIB)
    (tmp_path / "shm").mkdir()
    (line,) = check(tmp_path, saved, monkeypatch, shm=64 * GIB, host=64 * GIB)
    assert line == f"copies in memory: up to 8.0 GiB in {tmp_path / 'shm'} of a machine"
    with pytest.raises(UsageError, match=r"keeps up to 8\.0 GiB in .*shm of a machine, and 7\.0 GiB are free there"):
        check(tmp_path, saved, monkeypatch, shm=7 * GIB, host=64 * GIB)
    with pytest.raises(UsageError, match=r"it has 7\.0 GiB of memory besides that of the ranks"):
        check(tmp_path, saved, monkeypatch, shm=64 * GIB, host=7 * GIB)
    # The copies of the run that is resumed are not in addition.
    copy = tmp_path / "shm" / f"{RunDir(tmp_path / 'out').copies_name}-id" / "iter_0000005"
    copy.mkdir(parents=True)
    with (copy / "state").open("wb") as file:
        file.truncate(GIB)
    assert check(tmp_path, saved, monkeypatch, shm=7 * GIB, host=7 * GIB)
