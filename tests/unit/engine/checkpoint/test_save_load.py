"""Publication of a checkpoint, removal of older ones, and damaged files."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from isthmus.config.schema.parallel import ParallelConfig
from isthmus.engine.checkpoint import background_saves, checkpoint_folder
from isthmus.engine.checkpoint.checkpoint_checks import check_files
from isthmus.engine.checkpoint.checkpoint_folder import latest, publish, read_errors, write_errors
from isthmus.engine.checkpoint.checkpoint_writer import CheckpointWriter, SaveOptions
from isthmus.engine.checkpoint.run_state import BestLoss, Progress
from isthmus.engine.decoder.single_process_model import single_process_groups
from isthmus.engine.parallel.process_groups import agree
from isthmus.errors import DataError, IOFailure, IsthmusError, NoSpace
from isthmus.files.atomic_write import write_atomic


@pytest.mark.parametrize(
    ("keep", "saved", "remaining"),
    [
        (2, [6], [5, 6]),  # resumed from step 5
        (2, [11], [10, 11]),  # from step 10
        (3, [6], [5, 6, 20]),
        (3, [6, 7], [5, 6, 7]),
        (3, [15, 20], [10, 15, 20]),  # the branch reaches the step of the abandoned one
        (1, [6], [6]),
    ],
)
def test_checkpoints_of_an_abandoned_branch_are_removed_first(
    tmp_path: Path, keep: int, saved: list[int], remaining: list[int]
) -> None:
    for step in (5, 10, 20):
        (tmp_path / f"iter_{step:07d}").mkdir()
    for step in saved:
        staging = tmp_path / "staging"
        staging.mkdir()
        publish(staging, tmp_path / f"iter_{step:07d}", step, keep=keep)
        assert latest(tmp_path) == tmp_path / f"iter_{step:07d}"
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("iter_*")) == remaining


def test_best_checkpoint_is_kept(tmp_path: Path) -> None:
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 5), (6, 5)):
        (staging := tmp_path / "staging").mkdir()
        publish(staging, tmp_path / f"iter_{step:07d}", step, 1, best)
        assert {int(path.name[5:]) for path in tmp_path.glob("iter_*")} == {step, best}


def test_best_loss_counts_validations() -> None:
    best = BestLoss()
    updates = [best.update(step, loss) for step, loss in ((2, 3.0), (4, 2.0), (4, 2.0), (6, 2.0), (8, float("nan")))]
    assert updates == [True, True, False, False, False]
    assert (best.loss, best.step, best.evaluations_since) == (2.0, 4, 2)


@pytest.mark.parametrize("index", [b"I1\nI2\ns.", b""])
def test_damaged_index_is_a_data_error(index: bytes, tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(index)
    (tmp_path / "common.pt").write_bytes(b"")
    with pytest.raises(DataError, match=r"\.metadata cannot be read .* Resume from another checkpoint"):
        check_files(tmp_path)


def test_folder_that_cannot_be_created_is_an_io_failure_on_every_rank(tmp_path: Path) -> None:
    (root := tmp_path / "checkpoints").write_text("a file")
    progress, options = Progress(step=1, data=""), SaveOptions(keep=1)
    writer = CheckpointWriter(root / ".tmp-1", root / "1", progress, None, options, state={}, common={}, copied=False)
    with single_process_groups(), pytest.raises(IOFailure, match="the checkpoint could not be written to"):
        writer.complete()


class FailingWriter:
    """A checkpoint whose write fails when ``proceed`` is set."""

    def __init__(self, step: int) -> None:
        self.progress, self.proceed = Progress(step=step, data=""), threading.Event()

    def complete(self, group: Any = None) -> None:
        self.proceed.wait(60)
        raise NoSpace("no room for the checkpoint")


def test_a_failed_background_write_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """tests/faults/test_stop.py has a full disk."""
    writer, published = FailingWriter(5), list[int]()
    monkeypatch.setattr(background_saves, "take_state", lambda *_: writer)
    unused: Any = None
    saves = background_saves.Saves(
        tmp_path, ParallelConfig(), asynchronous=True, saved=lambda step, _: published.append(step), log=str
    )
    with single_process_groups():
        saves.save(unused, writer.progress, SaveOptions(keep=1))
        assert saves.ended() == 0.0
        writer.proceed.set()
        saves.close(60.0)
        assert saves.ended() == 1.0
        with pytest.raises(NoSpace, match="no room"):
            saves.conclude()
        saves.finish()  # nothing is left to wait for
    assert not published


def publish_steps(root: Path, *steps: int) -> None:
    for step in steps:
        (root / "staging").mkdir()
        publish(root / "staging", root / f"iter_{step:07d}", step, keep=3)


def test_tracker_that_names_another_step_than_was_published_last(tmp_path: Path) -> None:
    """A flipped bit resumed another step without a word."""
    publish_steps(tmp_path, 10, 12)
    tracker = tmp_path / "latest_checkpointed_iteration.txt"
    tracker.write_text("10")
    with pytest.raises(DataError, match=r"names step 10, and .*json beside it \[12\].*checkpoint\.resume="):
        latest(tmp_path)
    tracker.write_text("12")
    (tmp_path / "latest_checkpointed_iteration.json").write_text('{"steps": [8]}')
    with pytest.raises(DataError, match="names step 12"):
        latest(tmp_path)
    (tmp_path / "latest_checkpointed_iteration.json").unlink()  # as of an older version
    assert latest(tmp_path) == tmp_path / "iter_0000012"


@pytest.mark.parametrize("translated", [read_errors, write_errors])
def test_a_lost_rank_is_no_damage(translated: Any, tmp_path: Path) -> None:
    """A rank killed while others loaded a checkpoint made them report that the checkpoint is damaged."""
    lost = RuntimeError("[/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:2455: Connection reset by peer")
    for error in (lost, dist.DistNetworkError("failed to recv, got 0 bytes")):
        with pytest.raises(RuntimeError) as raised, translated(tmp_path):
            raise error
        assert raised.value is error
    with pytest.raises(IsthmusError), translated(tmp_path):
        raise RuntimeError("size mismatch")


@pytest.mark.parametrize("writes", range(4))
def test_kill_while_a_checkpoint_is_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes: int) -> None:
    """After any number of writes, the checkpoint before or the new one is the newest."""
    publish_steps(tmp_path, 10)
    done: list[Path] = []

    def write_or_die(path: Path, content: str) -> None:
        if len(done) == writes:
            raise KeyboardInterrupt
        done.append(path)
        write_atomic(path, content)

    monkeypatch.setattr(checkpoint_folder, "write_atomic", write_or_die)
    with pytest.raises(KeyboardInterrupt) if writes < 3 else nullcontext():
        publish_steps(tmp_path, 12)
    assert latest(tmp_path) == tmp_path / f"iter_00000{12 if writes >= 2 else 10}"
    assert (tmp_path / "iter_0000010").is_dir()


def test_retention_keeps_folders_of_the_user(tmp_path: Path) -> None:
    (tmp_path / "iter_0000001_backup").mkdir()
    publish_steps(tmp_path, 1, 2, 3, 4)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [
        "iter_0000001_backup", "iter_0000002", "iter_0000003", "iter_0000004",
    ]  # fmt: skip


@pytest.mark.parametrize("text", ["²", "9" * 5000, "7", ""])
def test_tracker_that_names_no_checkpoint(text: str, tmp_path: Path) -> None:
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="is not a checkpoint in"):
        latest(tmp_path)


def test_os_error_of_a_collective_stage_keeps_its_exit_code() -> None:
    def fails() -> None:
        raise FileNotFoundError(2, "No such file or directory", "train.bin")

    with single_process_groups(), pytest.raises(IOFailure, match=r"train\.bin: No such file or directory"):
        agree(fails)
