"""The index of a checkpoint is read without running code."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from isthmus.engine.checkpoint.index_file import INDEX, read_index
from isthmus.errors import DataError, UnsafeInput


class Touch:
    """Unpickled as torch and Megatron-Core do, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    state = {"weight": torch.arange(6).view(2, 3), "half": torch.ones(2, dtype=torch.bfloat16), "number": 3}
    dcp.save(state, checkpoint_id=tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_equals_what_torch_reads(checkpoint: Path) -> None:
    result, expected = read_index(checkpoint), dcp.FileSystemReader(checkpoint).read_metadata()
    assert result.storage_data == expected.storage_data and len(result.storage_data) == 3
    assert result.state_dict_metadata == expected.state_dict_metadata


def test_code_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "executed"
    (checkpoint / INDEX).write_bytes(pickle.dumps(Touch(target)))
    with pytest.raises(UnsafeInput, match=re.escape(f"{checkpoint / INDEX} names posix.mkdir")):
        read_index(checkpoint)
    assert not target.exists()


def test_damage_is_named(checkpoint: Path) -> None:
    full = (checkpoint / INDEX).read_bytes()
    for content in (full[:-100], b"", pickle.dumps({})):
        (checkpoint / INDEX).write_bytes(content)
        with pytest.raises(DataError, match=re.escape(f"{checkpoint / INDEX} cannot be read")):
            read_index(checkpoint)
