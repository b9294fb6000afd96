"""The index of a checkpoint is read without running code."""

from __future__ import annotations

import os
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from isthmus.convert.torch_dist.dcp_metadata import load_metadata
from isthmus.engine.checkpoint.checkpoint_index import CheckpointIndex, TensorParts
from isthmus.engine.checkpoint.index_file import INDEX, read_index, write_index
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
    index, expected = read_index(checkpoint), dcp.FileSystemReader(checkpoint).read_metadata()
    assert index.num_parts == len(expected.storage_data) == 3 and [*index.objects] == ["number"]
    for name, parts in index.tensors.items():
        stored = expected.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        assert (parts.dtype, parts.shape) == (stored.properties.dtype, tuple(stored.size))
        (chunk,) = stored.chunks
        assert (tuple(parts.offsets[0]), tuple(parts.sizes[0])) == (tuple(chunk.offsets), tuple(chunk.sizes))
        place = expected.storage_data[MetadataIndex(name, chunk.offsets)]
        file, offset, length = parts.places[0].tolist()
        assert (index.files[file], offset, length) == (place.relative_path, place.offset, place.length)


@pytest.mark.slow
@pytest.mark.parametrize("start", [0, 1 << 40])
def test_torch_reads_what_is_written(start: int, tmp_path: Path) -> None:
    """More parts than the writer makes at a time, in files of more than 2 GiB."""
    count = 20_000
    numbers = np.arange(count)
    offsets = np.stack([numbers // 100, numbers % 100 * 3], axis=1)
    places = np.stack([numbers % 2, start + numbers * 12, np.full(count, 12)], axis=1)
    tensors = {
        "weight": TensorParts(torch.float32, (200, 300), offsets, np.tile([1, 3], (count, 1)), places),
        "scalar": TensorParts(torch.bfloat16, (), np.zeros((1, 0), int), np.zeros((1, 0), int), places[:1]),
    }
    index = CheckpointIndex(["__0_0.distcp", "__1_0.distcp"], tensors, {"rng_state/shard_0_1": (1, start, 5)})
    write_index(tmp_path / INDEX, index, StorageMeta(checkpoint_id=tmp_path, save_id="a save"))
    result = dcp.FileSystemReader(tmp_path).read_metadata()
    weight = result.state_dict_metadata["weight"]
    assert isinstance(weight, TensorStorageMetadata) and weight.properties == TensorProperties(dtype=torch.float32)
    assert weight.size == torch.Size([200, 300]) and [tuple(c.offsets) for c in weight.chunks] == [*map(tuple, offsets)]
    assert all(isinstance(chunk.sizes, torch.Size) and chunk.sizes == (1, 3) for chunk in weight.chunks)
    assert len(result.storage_data) == count + 2
    for number in (0, 1, 16_384, count - 1):
        place = result.storage_data[MetadataIndex("weight", torch.Size(offsets[number]))]
        assert place == filesystem._StorageInfo(f"__{number % 2}_0.distcp", start + number * 12, 12)
    assert result.storage_data[MetadataIndex("scalar", torch.Size([]))].length == 12
    assert result.storage_data[MetadataIndex("rng_state/shard_0_1")].length == 5
    assert result.storage_meta is not None and result.storage_meta.save_id == "a save"
    assert read_index(tmp_path).to_bytes() == index.to_bytes()


def test_code_is_not_run(checkpoint: Path, tmp_path: Path) -> None:
    target = tmp_path / "executed"
    (checkpoint / INDEX).write_bytes(pickle.dumps(Touch(target)))
    with pytest.raises(UnsafeInput, match=re.escape(f"{checkpoint / INDEX} names posix.mkdir")):
        read_index(checkpoint)
    assert not target.exists()


def _by_name(member: Any, protocol: Any) -> Any:
    """As Python 3.11.0 to 3.11.3 pickle members of an enumeration."""
    return getattr, (type(member), member.name)


@pytest.mark.parametrize("protocol", [2, 4])
def test_memory_formats_by_name(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, protocol: int) -> None:
    stored, expected = dcp.FileSystemReader(checkpoint).read_metadata(), read_index(checkpoint)
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", _by_name)
    text = pickle.dumps(stored, protocol=protocol)
    assert b"getattr" in text
    (checkpoint / INDEX).write_bytes(text)
    assert read_index(checkpoint).tensors.keys() == expected.tensors.keys()
    assert load_metadata(checkpoint / INDEX).state_dict_metadata.keys() == stored.state_dict_metadata.keys()


class Attribute:
    def __reduce__(self) -> Any:
        return getattr, (TensorProperties, "__init__")


def test_other_attributes_are_refused(checkpoint: Path) -> None:
    (checkpoint / INDEX).write_bytes(pickle.dumps(Attribute()))
    for read in (lambda: read_index(checkpoint), lambda: load_metadata(checkpoint / INDEX)):
        with pytest.raises(UnsafeInput, match="getattr for more than a memory format"):
            read()


def test_damage_is_named(checkpoint: Path) -> None:
    full = (checkpoint / INDEX).read_bytes()
    for content in (full[:-100], b"", pickle.dumps({})):
        (checkpoint / INDEX).write_bytes(content)
        with pytest.raises(DataError, match=re.escape(f"{checkpoint / INDEX} cannot be read")):
            read_index(checkpoint)
