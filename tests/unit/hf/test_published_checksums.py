from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from isthmus.convert.transfer import convert
from isthmus.errors import DataError
from isthmus.files.checked_files import trusting
from isthmus.hf import published_checksums
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.published_checksums import published_hashes
from ranks.tiny import build_model_folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_model_folder(tmp_path_factory.mktemp("model") / "tiny", "llama", num_hidden_layers=1)


def _in_hub_cache(model: Path, cache: Path) -> Path:
    """The folder of a snapshot, as huggingface_hub stores it: links to blobs that are named by their hash."""
    snapshot = cache / "models--a--b" / "snapshots" / "1234"
    (cache / "models--a--b" / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in model.iterdir():
        content = path.read_bytes()
        git = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        name = hashlib.sha256(content).hexdigest() if path.suffix == ".safetensors" else git
        (cache / "models--a--b" / "blobs" / name).write_bytes(content)
        (snapshot / path.name).symlink_to(f"../../blobs/{name}")
    return snapshot


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damaged", ["model.safetensors", "config.json"])
def test_files_in_a_cache_of_the_hub_have_their_hashes(model: Path, tmp_path: Path, damaged: str) -> None:
    snapshot = _in_hub_cache(model, tmp_path)
    with ModelFolder.open(snapshot) as folder:
        line = folder.check_published()
    assert line is not None and re.search(r"3 files, 0\.00 GiB match their published hashes", line)
    assert any("match their published hashes" in note for note in convert(snapshot, tmp_path / "good").notes)
    read = json.loads((tmp_path / "good" / "checksums.json").read_text())["about"]["read"]
    assert {name: file["published"] for name, file in read.items()} == {
        path.name: path.resolve().name for path in snapshot.iterdir()
    }
    with ModelFolder.open(snapshot) as folder:
        _flip((snapshot / damaged).resolve())
        with pytest.raises(DataError, match=rf"{damaged} is damaged or was changed: .* Download it again.*--trust"):
            folder.check_published()
        # Two processes share the files.
        results = []
        for share in range(2):
            try:
                results.append(folder.check_published(share=share, shares=2))
            except DataError:
                results.append("refused")
        assert sorted(str(line).partition(":")[0] for line in results) == sorted([str(snapshot), "refused"])
        with trusting():
            assert folder.check_published() is None


def test_a_file_that_matched_is_hashed_again_only_after_a_change(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    snapshot = _in_hub_cache(model, tmp_path)
    hashed: list[str] = []
    monkeypatch.setattr(
        published_checksums, "_hash", lambda path, expected: hashed.append(path.name) or path.resolve().name
    )

    def check() -> tuple[list[str], str]:
        hashed.clear()
        with ModelFolder.open(snapshot) as folder:
            line = folder.check_published()
        assert line is not None
        return sorted(hashed), line

    everything = sorted(path.name for path in snapshot.iterdir())
    assert check()[0] == check()[0] == everything  # files of less than 10 s ago are not remembered
    monkeypatch.setattr(published_checksums, "_SETTLED_S", 0)
    assert check()[0] == everything
    again, line = check()
    assert again == [] and "3 files" in line and "3 of them checked before" in line
    weights, times = snapshot / "model.safetensors", (snapshot / "model.safetensors").stat()
    _flip(weights.resolve())
    os.utime(weights, ns=(times.st_atime_ns, times.st_mtime_ns))  # as a copy that keeps times
    assert check()[0] == ["model.safetensors"]
    (tmp_path / "cache" / "isthmus").rename(tmp_path / "cache" / "gone")
    (tmp_path / "cache" / "isthmus").write_text("not a folder")
    assert check()[0] == everything


@pytest.mark.slow_cases("model.safetensors.sha256")
@pytest.mark.parametrize("name", ["SHA256SUMS", "sha256sum.txt", "model.safetensors.sha256"])
def test_lists_of_sha256_are_checked(model: Path, tmp_path: Path, name: str) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    digest = hashlib.sha256((copy / "model.safetensors").read_bytes()).hexdigest()
    (copy / name).write_text(digest + ("\n" if name.endswith(".sha256") else " *model.safetensors\n# a comment\n"))
    convert(copy, tmp_path / "good")
    _flip(copy / "model.safetensors")
    with pytest.raises(DataError, match=f"it was published with {digest}"):
        convert(copy, tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_lists_name_files_of_their_folder_only(tmp_path: Path) -> None:
    digest = "0" * 64
    lines = [f"{digest}  {name}" for name in ("../a", "/etc/passwd", "sub/b", "..", "good", "./also")]
    (tmp_path / "SHA256SUMS").write_text("\n".join(lines))
    (tmp_path / "binary.sha256").write_bytes(bytes(range(256)))
    assert sorted(path.name for path in published_hashes(tmp_path)) == ["also", "good"]
