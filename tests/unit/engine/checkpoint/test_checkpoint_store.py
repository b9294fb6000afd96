"""Checkpoints in a store: what is complete, what is removed, and what a kill leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from isthmus.engine.checkpoint.checkpoint_store import MARKER, OWNER, CheckpointStore, address_of, stored_data
from isthmus.errors import IOFailure, MissingInput, OutputInUse, UsageError
from isthmus.files.object_store import ObjectStore


class Killed(BaseException):
    """The process ends here."""


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[CheckpointStore]:
    url = f"memory://{tmp_path.name}/run" if request.param == "memory" else f"file://{tmp_path}/store/run"
    store = CheckpointStore(url)
    yield store
    store.objects.remove(store.objects.sizes())


def save(store: CheckpointStore, folder: Path, step: int, *, keep: int = 2, best: int | None = None) -> None:
    staging = folder / f"staging-{step}"
    (staging / "hf").mkdir(parents=True, exist_ok=True)
    (staging / ".metadata").write_text(f"index {step}")
    (staging / "hf/config.json").write_text("{}")
    store.begin(step)
    with store.create(step, "__0_0.distcp") as stream:
        stream.write(b"x" * 100)
    store.publish(staging, step, {"__0_0.distcp": 100}, keep, best)


def steps(store: CheckpointStore) -> list[int]:
    return sorted(store.published())


def test_checkpoints_are_published_and_removed(store: CheckpointStore, tmp_path: Path) -> None:
    assert store.latest() is None
    for step, best, remaining in ((1, 1, [1]), (2, 1, [1, 2]), (3, 1, [1, 2, 3]), (4, 1, [1, 3, 4])):
        save(store, tmp_path, step, best=best)
        assert steps(store) == remaining and store.latest() == step
    assert {name.partition("/")[0] for name in store.objects.sizes()} == {f"iter_000000{step}" for step in (1, 3, 4)}
    assert set(store.objects.sizes("iter_0000004")) == {
        f"iter_0000004/{name}" for name in (MARKER, ".metadata", "hf/config.json", "__0_0.distcp")
    }


def test_newest_is_the_one_published_last(store: CheckpointStore, tmp_path: Path) -> None:
    """A run that was resumed from step 5 has abandoned step 20."""
    for step in (5, 20):
        save(store, tmp_path, step)
    save(store, tmp_path, 6, keep=3)
    assert steps(store) == [5, 6, 20] and store.latest() == 6


@pytest.mark.slow
@pytest.mark.parametrize("step", [2, 1], ids=["next", "repeated"])
def test_kill_before_any_object_leaves_complete_checkpoints(
    step: int, store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each object of a save, and each removal, is once the last one; the next save cleans up."""
    for last in range(20):
        for name in list(store.objects.sizes()):
            store.objects.remove([name])
        save(store, tmp_path, 1)
        count = 0

        def limited(method: Any, last: int = last) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                nonlocal count
                count += 1
                if count > last:
                    raise Killed
                return method(*args, **kwargs)

            return call

        with monkeypatch.context() as patched:
            for method in ("create", "remove"):
                patched.setattr(ObjectStore, method, limited(getattr(ObjectStore, method)))
            try:
                save(store, tmp_path, step, keep=1)
                break
            except Killed:
                pass
        for complete in store.published().values():
            stored = store.objects.sizes(f"iter_{complete.step:07d}")
            assert all(stored[f"iter_{complete.step:07d}/{name}"] == size for name, size in complete.sizes.items())
        assert step == 1 or store.latest() in (1, 2)
        save(store, tmp_path, 3, keep=1)
        assert steps(store) == [3]
        assert {name.partition("/")[0] for name in store.objects.sizes()} == {"iter_0000003"}
    assert 4 < last < 19 and store.latest() == step


def test_a_second_run_is_refused(store: CheckpointStore, tmp_path: Path) -> None:
    store.claim(tmp_path / "a")
    save(store, tmp_path, 1)
    second = CheckpointStore(store.url)
    with pytest.raises(OutputInUse, match=rf"is being written by another run \(out={tmp_path}/a, host=.*{OWNER} if"):
        second.claim(tmp_path / "b")
    store.objects.remove([OWNER])  # as the message tells
    second.claim(tmp_path / "b")
    save(second, tmp_path, 2)
    assert steps(second) == [1, 2]


def test_an_earlier_start_publishes_nothing(store: CheckpointStore, tmp_path: Path) -> None:
    """It was believed dead, and is in the middle of a save."""
    store.claim(tmp_path / "a")
    save(store, tmp_path, 1)
    store.begin(2)
    with store.create(2, "__0_0.distcp") as stream:
        stream.write(b"y" * 100)
    again = CheckpointStore(store.url)
    again.claim(tmp_path / "a")
    with pytest.raises(OutputInUse, match="is being written by another run"):
        store.publish(tmp_path / "staging-1", 2, {"__0_0.distcp": 100}, 2, None)
    with pytest.raises(OutputInUse):
        store.begin(2)
    save(again, tmp_path, 2)
    data = stored_data(again.fetch(2, tmp_path / "copy"))
    assert data is not None and data.read("__0_0.distcp", 0, 100) == b"x" * 100


def test_of_two_runs_at_the_same_time_one_is_refused(
    store: CheckpointStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one claims the store after the first one has seen that nobody has."""
    second, read, claimed = CheckpointStore(store.url), ObjectStore.read, []

    def read_before_the_other(objects: ObjectStore, name: str, *bounds: int) -> bytes:
        content = read(objects, name, *bounds)
        if not claimed:
            claimed.append(second)
            second.claim(tmp_path / "b")
        return content

    with monkeypatch.context() as patched:
        patched.setattr(ObjectStore, "read", read_before_the_other)
        with pytest.raises(OutputInUse):
            store.claim(tmp_path / "a")
    save(second, tmp_path, 1)


def test_incomplete_data_is_not_published(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, tmp_path, 1)
    (staging := tmp_path / "staging").mkdir()
    store.begin(2)
    with store.create(2, "__0_0.distcp") as stream:
        stream.write(b"x" * 99)
    with pytest.raises(IOFailure, match=r"__0_0\.distcp has 99 bytes, 100 were written"):
        store.publish(staging, 2, {"__0_0.distcp": 100}, 2, None)
    assert steps(store) == [1]


@pytest.mark.parametrize("content", [b"", b'{"step": 1', b'{"step": 1, "number": 9, "files": {}, "checksum": "0"}'])
def test_damaged_marker_publishes_nothing(content: bytes, store: CheckpointStore, tmp_path: Path) -> None:
    save(store, tmp_path, 1)
    store.objects.write(f"iter_0000001/{MARKER}", content)
    assert store.latest() is None
    with pytest.raises(MissingInput, match="is no complete checkpoint"):
        store.fetch(1, tmp_path / "copy")


def test_fetched_copy_has_the_small_files(store: CheckpointStore, tmp_path: Path) -> None:
    save(store, tmp_path, 1)
    folder = store.fetch(1, tmp_path / "copy")
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert files == {".metadata", "hf/config.json", ".tmp-origin.json"}
    assert address_of(folder) == f"{store.url}/iter_0000001" and address_of(tmp_path) == str(tmp_path)
    data = stored_data(folder)
    assert data is not None and data.read("__0_0.distcp", 10, 20) == b"x" * 10
    (folder / ".metadata").write_text("changed")
    assert (store.fetch(1, tmp_path / "copy") / ".metadata").read_text() == "changed"  # not downloaded twice
    save(store, tmp_path, 1)
    assert (store.fetch(1, tmp_path / "copy") / ".metadata").read_text() == "index 1"  # published again


def test_marker_with_a_path_outside_is_refused(store: CheckpointStore, tmp_path: Path) -> None:
    from isthmus.engine.checkpoint.checkpoint_store import Published
    from isthmus.errors import DataError

    store.objects.write(f"iter_0000001/{MARKER}", Published(1, 1, {"../../secret": 1}).to_json())
    with pytest.raises(DataError, match="outside of the folder"):
        store.fetch(1, tmp_path / "copy")


def test_unknown_kind_of_store() -> None:
    with pytest.raises(
        UsageError, match=r"nowhere://bucket cannot be opened: .* Install the library that fsspec needs"
    ):
        CheckpointStore("nowhere://bucket")


def test_marker_is_json() -> None:
    from isthmus.engine.checkpoint.checkpoint_store import Published

    marker = Published(3, 2, {"common.pt": 5})
    assert Published.from_json(marker.to_json()) == marker and json.loads(marker.to_json())["files"] == marker.sizes
