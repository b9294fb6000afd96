"""Publication of a checkpoint, removal of older ones, and damaged files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from isthmus.config.schema.parallel import ParallelConfig
from isthmus.engine.checkpoint.save_load import Progress, _publish, check_files, save
from isthmus.engine.single_process_model import single_process_groups
from isthmus.errors import DataError, IOFailure


def test_checkpoints_of_an_abandoned_continuation_are_removed_first(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        (tmp_path / f"iter_{step:07d}").mkdir()
    for step in (12, 14):  # the run was resumed from step 10
        staging = tmp_path / "staging"
        staging.mkdir()
        _publish(staging, tmp_path / f"iter_{step:07d}", step, keep=2)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000012", "iter_0000014"]


@pytest.mark.parametrize("index", [b"cno_such_module\nname\n.", b"I1\nI2\ns.", b""])
def test_damaged_index_is_a_data_error(index: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(index)
    (tmp_path / "common.pt").write_bytes(b"")
    with pytest.raises(DataError, match=r"\.metadata cannot be read .* Resume from another checkpoint"):
        check_files(tmp_path)


def test_folder_that_cannot_be_created_is_an_io_failure_on_every_rank(tmp_path: Path) -> None:
    (root := tmp_path / "checkpoints").write_text("a file")
    unused: Any = None
    with single_process_groups(), pytest.raises(IOFailure, match="the checkpoint could not be written to"):
        save(root, unused, Progress(step=1, data=""), ParallelConfig(), keep=1)
