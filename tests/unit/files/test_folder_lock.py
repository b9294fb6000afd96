from __future__ import annotations

import errno
import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from isthmus.errors import OutputExists, OutputInUse
from isthmus.files import folder_lock
from isthmus.files.folder_lock import LOCK, FolderLock, locked_folder
from isthmus.hf import staged_folder
from isthmus.hf.staged_folder import StagedFolder

pytestmark = pytest.mark.processes  # a lock is of a process


@pytest.fixture(autouse=True)
def _short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_WAIT_S", 0.0)


@contextmanager
def held(path: Path) -> Iterator[int]:
    """Another process holds the lock; yields its id. It is killed at the end and leaves the file."""
    read, write = os.pipe()
    if not (pid := os.fork()):
        FolderLock(path, path).acquire()
        os.write(write, b"x")
        signal.pause()
    os.read(read, 1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(read)
        os.close(write)


def test_other_process_is_named_and_a_dead_one_is_replaced(tmp_path: Path) -> None:
    with held(tmp_path / LOCK) as pid:
        for _ in range(2):  # the refused process does not release it
            with pytest.raises(OutputInUse, match=rf"being written by process {pid} on .*: isthmus.* choose another"):
                FolderLock(tmp_path / LOCK, tmp_path).acquire()
    assert (tmp_path / LOCK).exists()
    with FolderLock(tmp_path / LOCK, tmp_path):
        assert f'"pid": {os.getpid()}' in (tmp_path / LOCK).read_text()
    assert not list(tmp_path.iterdir())


def test_holder_removes_the_folder_at_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_WAIT_S", 20.0)
    lock, (read, write) = tmp_path / "a" / LOCK, os.pipe()
    if not (pid := os.fork()):
        FolderLock(lock, lock).acquire()
        os.write(write, b"x")
        time.sleep(0.15)
        shutil.rmtree(lock.parent)
        os._exit(0)
    os.read(read, 1)
    with FolderLock(lock, lock):
        assert lock.exists()
    os.waitpid(pid, 0)
    os.close(read)
    os.close(write)


def test_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(tmp_path / LOCK) as pid:

        def unsupported(*_: object) -> None:
            raise OSError(errno.ENOLCK, "No locks available")

        monkeypatch.setattr(fcntl, "lockf", unsupported)
        with pytest.raises(OutputInUse, match=f"process {pid}"):
            FolderLock(tmp_path / LOCK, tmp_path).acquire()
    with FolderLock(tmp_path / LOCK, tmp_path):
        pass


def test_new_folder_that_stays_empty_is_removed(tmp_path: Path) -> None:
    with locked_folder(tmp_path / "a" / "b"):
        assert (tmp_path / "a" / "b" / LOCK).exists()
    assert not (tmp_path / "a").exists()
    with locked_folder(tmp_path / "c"):
        (tmp_path / "c" / "file").touch()
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["file"]


def test_two_conversions_into_one_folder(tmp_path: Path) -> None:
    """The second one neither writes nor removes what the first one writes."""
    out = tmp_path / "out"
    (tmp_path / ".tmp-out").mkdir()
    with held(tmp_path / ".tmp-out.lock"):
        (tmp_path / ".tmp-out" / "model.safetensors").write_bytes(b"1")
        second = StagedFolder(out)
        with pytest.raises(OutputInUse, match=f"{out} is being written by"):
            second.create()
        second.discard()
        assert (tmp_path / ".tmp-out" / "model.safetensors").exists()
    with StagedFolder(out) as staged:
        assert not list(staged.path.iterdir())
        (staged.path / "config.json").write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_folder_is_locked_until_it_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the next process finds no folder, and removes the one that is about to be renamed."""

    def renamed(source: Path, target: Path) -> None:
        assert (tmp_path / ".tmp-out.lock").exists()
        source.rename(target)

    monkeypatch.setattr(staged_folder, "rename", renamed)
    with StagedFolder(tmp_path / "out"):
        pass
    (tmp_path / ".tmp-out.lock").touch()  # of a process that was killed after the renaming
    with pytest.raises(OutputExists, match="exists already"):
        StagedFolder(tmp_path / "out").create()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
