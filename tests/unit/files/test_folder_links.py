from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.convert.legacy.from_legacy import LegacyFolder
from isthmus.convert.torch_dist.from_torch_dist import TorchDistFolder
from isthmus.data.readers.file_sources import find_sources
from isthmus.engine.checkpoint.checkpoint_checks import check_files
from isthmus.errors import UnsafeInput
from isthmus.files.folder_links import check_links
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.peft_folder import PeftFolder
from isthmus.hf.tokenizer.tokenizer import load_tokenizer

READERS = {
    "model": ModelFolder.open,
    "adapter": PeftFolder,
    "tokenizer": load_tokenizer,
    "torch_dist": TorchDistFolder,
    "legacy": LegacyFolder,
    "resumed": check_files,
    "data": lambda folder: find_sources([folder]),
}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("a key")
    return tmp_path / "secret"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that each reader takes for its own."""
    folder = tmp_path / "folder"
    folder.mkdir()
    for name in ("config.json", "adapter_config.json", "tokenizer.json"):
        (folder / name).write_text(json.dumps({"model_type": "llama"}))
    for name in ("adapter_model.safetensors", ".metadata"):
        (folder / name).write_bytes(b"")
    return folder


@pytest.mark.parametrize("name", READERS)
def test_reader_refuses_a_link_out_of_its_folder(name: str, folder: Path, secret: Path) -> None:
    (folder / "LICENSE").symlink_to(secret)
    with pytest.raises(UnsafeInput, match=r"folder/LICENSE is a link to .*secret, a file outside the folder"):
        READERS[name](folder)


@pytest.mark.parametrize("target", ["..", "../secret", "loop"])
def test_link_in_a_subfolder_is_refused(folder: Path, secret: Path, target: str) -> None:
    (folder / "mp_rank_00").mkdir()
    (folder / "mp_rank_00" / "loop").symlink_to(f"../{target}" if target != "loop" else "/proc/self/cwd")
    with pytest.raises(UnsafeInput, match="mp_rank_00/loop"):
        check_links(folder)


def test_links_within_the_folder_and_a_link_to_the_folder_are_followed(folder: Path, tmp_path: Path) -> None:
    (folder / "LICENSE").symlink_to("config.json")
    (tmp_path / "link").symlink_to(folder)
    check_links(tmp_path / "link")


def test_blobs_of_the_hub_cache_are_followed(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--a--b" / "blobs").mkdir()
    (tmp_path / "models--a--b" / "blobs" / "hash").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/hash")
    check_links(snapshot)


def test_data_in_a_subfolder_of_a_snapshot_and_a_named_link_are_read(tmp_path: Path) -> None:
    cache = tmp_path / "datasets--org--name"
    data = cache / "snapshots" / "0a1b" / "data"
    data.mkdir(parents=True)
    (cache / "blobs").mkdir()
    (cache / "blobs" / "c0ffee").write_text('{"text": "a"}\n')
    (data / "a.jsonl").symlink_to("../../../blobs/c0ffee")
    (tmp_path / "link.jsonl").symlink_to(data / "a.jsonl")
    assert find_sources([data]).names == [str(data / "a.jsonl")]
    assert find_sources([tmp_path / "link.jsonl"]).names == [str(tmp_path / "link.jsonl")]
