from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from isthmus.errors import NoSpace
from isthmus.files.atomic_write import atomic_file, rename, write_atomic


def test_file_appears_with_its_whole_content_only(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    with atomic_file(path) as temporary:
        temporary.write_text("new")
        assert not path.exists() and temporary.parent == tmp_path
    assert path.read_text() == "new"
    write_atomic(path, "ä")
    assert path.read_bytes() == "ä".encode() and os.listdir(tmp_path) == ["config.yaml"]


def test_failed_write_leaves_the_old_file_and_no_temporary(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_file(path) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["config.yaml"]


def test_file_and_folder_are_synced_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    write_atomic(tmp_path / "a", b"x")
    assert [Path(path).name for path in synced] == [".tmp-a", tmp_path.name]
    rename(tmp_path / "a", tmp_path / "b")
    assert synced[2:] == [str(tmp_path)] and os.listdir(tmp_path) == ["b"]


def test_full_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NoSpace, match="no space left to write"):
        write_atomic(tmp_path / "a", b"x")
    assert os.listdir(tmp_path) == []
