from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.errors import DataError, Hang, IOFailure, MissingInput, NoSpace, OutputExists, Preempted
from isthmus.files.folder_lock import LOCK
from isthmus.recipes.run_dir import RunDir, write_record


class Failed(Exception):
    """A failed check."""


def with_checkpoint(root: Path, step: int) -> RunDir:
    folder = RunDir(root)
    (folder.checkpoints / f"iter_{step:07d}").mkdir(parents=True)
    (folder.checkpoints / f"iter_{step:07d}" / ".metadata").touch()
    (folder.checkpoints / "latest_checkpointed_iteration.txt").write_text(str(step))
    folder.config.write_text("old")
    return folder


def test_new_and_empty_folders_start_fresh(tmp_path: Path) -> None:
    assert RunDir(tmp_path / "new").checkpoint_to_resume("auto") is None
    assert RunDir(tmp_path).checkpoint_to_resume("never") is None


def test_foreign_folder_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(OutputExists, match="not a run folder"):
        RunDir(tmp_path).checkpoint_to_resume("auto")


def test_newest_and_named_checkpoints(tmp_path: Path) -> None:
    folder = with_checkpoint(tmp_path / "run", 5)
    newest = folder.checkpoints / "iter_0000005"
    assert folder.checkpoint_to_resume("auto") == newest
    with pytest.raises(OutputExists, match="never"):
        folder.checkpoint_to_resume("never")
    other = RunDir(tmp_path / "other")
    assert other.checkpoint_to_resume(str(newest)) == newest
    assert other.checkpoint_to_resume(str(folder.checkpoints)) == newest
    checkpoint = with_checkpoint(tmp_path / "other", 7).checkpoints / "iter_0000007"
    assert other.checkpoint_to_resume(str(newest)) == newest
    write_record(checkpoint, {"began_from": str(newest)})  # the same command again
    assert other.checkpoint_to_resume(str(newest)) == checkpoint
    assert other.checkpoint_to_resume(str(other.checkpoints / "iter_0000007")) == checkpoint
    for wrong in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(MissingInput, match=str(wrong)):
            other.checkpoint_to_resume(str(wrong))


def test_tracker_of_a_missing_checkpoint(tmp_path: Path) -> None:
    folder = with_checkpoint(tmp_path, 5)
    (folder.checkpoints / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(DataError, match="'7'"):
        folder.checkpoint_to_resume("auto")


def test_export_without_checkpoints_is_not_overwritten(tmp_path: Path) -> None:
    folder = RunDir(tmp_path)
    folder.config.write_text("old")
    assert folder.checkpoint_to_resume("auto") is None  # was interrupted before its first checkpoint
    folder.export().mkdir()
    with pytest.raises(OutputExists, match="finished export"):
        folder.checkpoint_to_resume("auto")


def test_failed_checks_remove_a_new_run(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "a" / "b")
    with pytest.raises(Failed), folder.locked(), folder.checking("new"):
        assert folder.config.read_text() == "new"
        folder.data.mkdir()
        (folder.data / "part").touch()
        raise Failed
    assert not list(tmp_path.iterdir())


def test_stop_keeps_the_prepared_data(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "run")
    with pytest.raises(Preempted), folder.locked(), folder.checking("new"):
        folder.data.mkdir()
        raise Preempted("as asked")
    assert folder.data.is_dir() and folder.checkpoint_to_resume("auto") is None


def test_a_lost_worker_or_a_full_disk_keeps_the_tokenized_parts(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "run")
    for error in (Hang("a worker was killed"), NoSpace("the disk is full")):
        with pytest.raises(type(error)), folder.locked(), folder.checking("new"):
            (folder.data / "train.partial").mkdir(parents=True, exist_ok=True)
            raise error
        assert (folder.data / "train.partial").is_dir()


def test_failed_checks_keep_foreign_files(tmp_path: Path) -> None:
    folder = RunDir(tmp_path / "run")
    with pytest.raises(Failed), folder.locked(), folder.checking("new"):
        (folder.root / "notes.txt").touch()
        raise Failed
    assert [path.name for path in folder.root.iterdir()] == ["notes.txt"]


def test_failed_checks_keep_an_earlier_run(tmp_path: Path) -> None:
    folder = with_checkpoint(tmp_path, 5)
    folder.data.mkdir()
    with pytest.raises(Failed), folder.locked(), folder.checking("new"):
        raise Failed
    assert folder.config.read_text() == "old" and folder.data.is_dir()


def test_start_that_was_killed_can_be_repeated(tmp_path: Path) -> None:
    """It left the lock and a temporary file, and no config yet."""
    for name in (LOCK, ".tmp-config.yaml"):
        (tmp_path / name).touch()
    assert RunDir(tmp_path).checkpoint_to_resume("auto") is None
    (tmp_path / "notes.txt").touch()
    with pytest.raises(OutputExists, match="not a run folder"):
        RunDir(tmp_path).checkpoint_to_resume("auto")


def test_begin_records_the_config_and_clears_leftovers(tmp_path: Path) -> None:
    folder = with_checkpoint(tmp_path, 5)
    (folder.checkpoints / ".tmp-iter_0000006").mkdir()
    (tmp_path / ".tmp-hf").mkdir()
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    folder.begin("new", {}, fresh=False)
    assert folder.config.read_text() == "new" and (tmp_path / "metrics.jsonl").exists()
    assert not list(tmp_path.rglob(".tmp*"))
    folder.begin("new", {}, fresh=True)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_folder_that_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(IOFailure, match="file/run"), RunDir(tmp_path / "file" / "run").locked():
        pass
