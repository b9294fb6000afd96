"""Files at ``gs://`` and ``hf://``, on servers of this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from free_port import free_port
from isthmus.data.readers.file_formats import read_chunks
from isthmus.data.readers.file_sources import find_sources
from isthmus.engine.checkpoint.checkpoint_store import OWNER, CheckpointStore
from isthmus.errors import MissingInput, OutputInUse
from isthmus.files.remote_files import file_bytes, open_binary, remote_version
from unit.hub_server import serve_hub

LINES = b"".join(json.dumps({"text": f"text {number}"}).encode() + b"\n" for number in range(3))


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A Hub with a data set; yields the requested paths."""
    from huggingface_hub import HfFileSystem

    with serve_hub({"datasets/org/texts": {"data/a.jsonl": LINES, "README.md": b""}}) as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.address)
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("FSSPEC_HF_ENDPOINT", server.address)
        HfFileSystem.clear_instance_cache()
        yield server.asked
        HfFileSystem.clear_instance_cache()


@pytest.mark.thorough
def test_data_on_the_hub(hub: list[str]) -> None:
    from fsspec.config import conf, set_conf_env

    set_conf_env(conf)
    try:
        url = "hf://datasets/org/texts/data/a.jsonl"
        assert file_bytes(url) == len(LINES) and open_binary(url).read() == LINES
        assert remote_version(url) == "blob_id data/a.jsonl"
        sources = find_sources(["hf://datasets/org/texts/data"])
        assert list(sources.names) == [url] and hub
        texts = [record.value["text"] for chunk in read_chunks(sources.names) for record in chunk.parse()]
        assert texts == ["text 0", "text 1", "text 2"]
        with pytest.raises(MissingInput):
            open_binary("hf://datasets/org/texts/data/b.jsonl").read()
    finally:
        conf.pop("hf", None)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The URL of a bucket on an emulator of Google Cloud Storage."""
    reason = "needs gcsfs and an emulator: pip install gcsfs gcp-storage-emulator 'setuptools<80'"
    emulator = pytest.importorskip("gcp_storage_emulator.server", reason=reason)
    gcsfs = pytest.importorskip("gcsfs", reason=reason)
    port = free_port()
    server = emulator.create_server("127.0.0.1", port, in_memory=True, default_bucket="bucket")
    server.start()
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    gcsfs.GCSFileSystem.clear_instance_cache()
    try:
        yield "gs://bucket/run"
    finally:
        server.stop()
        gcsfs.GCSFileSystem.clear_instance_cache()


@pytest.mark.thorough
def test_checkpoints_in_google_cloud_storage(bucket: str, tmp_path: Path) -> None:
    store = CheckpointStore(bucket)
    store.claim(tmp_path / "a")
    (tmp_path / "staging").mkdir()
    (tmp_path / "staging/.metadata").write_text("index")
    store.begin(3)
    with store.create(3, "__0_0.distcp") as stream:
        stream.write(b"x" * 1000)
    store.publish(tmp_path / "staging", 3, {"__0_0.distcp": 1000}, 1, None)
    assert store.latest() == 3
    with pytest.raises(OutputInUse, match=f"remove {bucket}/{OWNER} if that run has ended"):
        CheckpointStore(bucket).claim(tmp_path / "b")
    CheckpointStore(bucket).download(3, tmp_path / "copy", lambda done, total: None)
    assert (tmp_path / "copy/__0_0.distcp").read_bytes() == b"x" * 1000
