"""``.metadata`` files are compatible with torch in both directions, without importing torch.distributed."""

from __future__ import annotations

import pickle
import subprocess
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, save
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from isthmus.convert.torch_dist import dcp_metadata as ours
from isthmus.convert.torch_dist.dcp_metadata import load_metadata, save_metadata
from isthmus.errors import DataError, UnsafeInput

SIZE, AT = torch.Size((2, 3)), torch.Size((0, 0))
OURS = ours.Metadata(
    {
        "decoder.a": ours.TensorStorageMetadata(
            ours.TensorProperties(torch.bfloat16), SIZE, [ours.ChunkStorageMetadata(AT, SIZE)]
        ),
        "decoder.b": ours.BytesStorageMetadata(),
    },
    {
        ours.MetadataIndex("decoder.a", AT): ours.StorageInfo("__0_0.distcp", 0, 99),
        ours.MetadataIndex("decoder.b"): ours.StorageInfo("__0_1.distcp", 99, 1),
    },
)
THEIRS = Metadata(
    {
        "decoder.a": TensorStorageMetadata(TensorProperties(torch.bfloat16), SIZE, [ChunkStorageMetadata(AT, SIZE)]),
        "decoder.b": BytesStorageMetadata(),
    },
    storage_data={
        MetadataIndex("decoder.a", AT): _StorageInfo("__0_0.distcp", 0, 99),
        MetadataIndex("decoder.b"): _StorageInfo("__0_1.distcp", 99, 1),
    },
    **({"version": "1.0.0"} if hasattr(Metadata, "version") else {}),  # torch 2.6 does not write it
)


def test_metadata_of_megatron_core_0_15(tmp_path: Path) -> None:
    """Its class is a subclass of torch's."""
    save_metadata(OURS, tmp_path / ".metadata")
    content = (tmp_path / ".metadata").read_bytes()
    theirs = b"cmegatron.core.dist_checkpointing.strategies.torch\nMCoreMetadata\n"
    (tmp_path / ".metadata").write_bytes(content.replace(b"ctorch.distributed.checkpoint.metadata\nMetadata\n", theirs))
    assert theirs in (tmp_path / ".metadata").read_bytes()
    assert load_metadata(tmp_path / ".metadata") == OURS


def test_written_metadata_loads_in_torch(tmp_path: Path) -> None:
    save_metadata(OURS, tmp_path / ".metadata")
    assert pickle.loads((tmp_path / ".metadata").read_bytes()) == THEIRS
    read = FileSystemReader(tmp_path).read_metadata()
    assert (read.state_dict_metadata, read.storage_data) == (THEIRS.state_dict_metadata, THEIRS.storage_data)
    assert load_metadata(tmp_path / ".metadata") == OURS


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_metadata_of_torch_is_read(protocol: int, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(THEIRS, protocol))
    assert load_metadata(tmp_path / ".metadata") == OURS


def test_checkpoint_saved_by_torch_is_read(tmp_path: Path) -> None:
    state = {"decoder.a": torch.ones(2, 3), "args": {"some": (1, "thing")}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a single process
        save(state, storage_writer=FileSystemWriter(tmp_path))
    result = load_metadata(tmp_path / ".metadata")
    entry = result.state_dict_metadata["decoder.a"]
    assert isinstance(entry, ours.TensorStorageMetadata) and (entry.properties.dtype, entry.size) == (
        torch.float32,
        SIZE,
    )
    assert ours.MetadataIndex("decoder.a", AT) in result.storage_data


@pytest.mark.parametrize("content", [THEIRS.state_dict_metadata, 3, StorageMeta()])
def test_other_pickles_are_refused(content: object, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match="is not checkpoint metadata"):
        load_metadata(tmp_path / "x")


@pytest.mark.parametrize("protocol", [2, 4])
def test_other_classes_are_refused(protocol: int, tmp_path: Path) -> None:
    for content in (eval, torch.load, subprocess.run, FileSystemReader):
        (tmp_path / "x").write_bytes(pickle.dumps({"a": content}, protocol))
        with pytest.raises(UnsafeInput, match="which no checkpoint needs"):
            load_metadata(tmp_path / "x")
