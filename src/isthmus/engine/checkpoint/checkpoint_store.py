"""Checkpoints in an object store: each rank streams its file there, and an object that is written last publishes them.

::

    s3://bucket/run/iter_0000010/__0_0.distcp, .metadata, common.pt, ..., published.json

A folder without ``published.json``, after a kill or a failed upload, is no checkpoint, and the next save removes it.
``s3://bucket/run/owner.json`` names the run that writes there.
"""

from __future__ import annotations

import fcntl
import json
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from isthmus.engine.checkpoint.checkpoint_folder import checkpoint_dir, steps_to_remove
from isthmus.errors import DataError, IOFailure, MissingInput, NoSpace, OutputInUse, disk_errors
from isthmus.files.atomic_write import TEMPORARY
from isthmus.files.file_checksums import content_checksum
from isthmus.files.input_files import parse_json, read_json
from isthmus.files.object_store import ObjectStore

MARKER = "published.json"
OWNER = "owner.json"
ORIGIN = f"{TEMPORARY}origin.json"
"""In the local copy of a checkpoint without its data files: where these are."""
_DATA = ".distcp"
_THREADS = 4
"""Files that are downloaded at the same time."""
_FOLDER = re.compile("iter_([0-9]{7,18})")


@dataclass(frozen=True, slots=True)
class Published:
    """The content of ``published.json``."""

    step: int
    number: int
    """Checkpoints are numbered in the order of their publication; a branch may repeat steps."""
    sizes: dict[str, int]
    """Bytes of all files, by path relative to the folder."""
    save_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    """Differs also if a step is saved again."""

    def to_json(self) -> bytes:
        content = {"step": self.step, "number": self.number, "files": self.sizes, "save_id": self.save_id}
        return json.dumps({**content, "checksum": content_checksum(content)}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Published | None:
        """None if the content is not complete."""
        try:
            content = parse_json(text)
            checksum = content.pop("checksum")
            if content_checksum(content) != checksum:
                return None
            return cls(content["step"], content["number"], content["files"], content["save_id"])
        except (DataError, KeyError, TypeError, AttributeError, ValueError):
            return None


class CheckpointStore:
    """The checkpoints of a run in an object store; the run that has claimed it writes."""

    def __init__(self, url: str) -> None:
        """Raises UsageError, as :class:`isthmus.files.object_store.ObjectStore`."""
        self.objects: ObjectStore = ObjectStore(url)
        self._start: str | None = None

    @property
    def url(self) -> str:
        return self.objects.url

    def address(self, step: int) -> str:
        return f"{self.url}/{_name(step)}"

    def published(self) -> dict[int, Published]:
        """All complete checkpoints, by step."""
        result = {}
        for name in self.objects.sizes():
            folder, _, rest = name.partition("/")
            if rest == MARKER and (match := _FOLDER.fullmatch(folder)):
                marker = Published.from_json(self.objects.read(name))
                if marker is not None and marker.step == int(match[1]):
                    result[marker.step] = marker
        return result

    def latest(self) -> int | None:
        """Step of the checkpoint that was published last."""
        return max(self.published().values(), key=lambda marker: marker.number, default=_NONE).step or None

    def claim(self, out: Path) -> None:
        """Write to the store from now on, as the run with the run folder ``out``.

        A run with the same run folder is an earlier start of this one, which cannot save any more, if it still runs.

        Raises:
            OutputInUse: another run writes there.
        """
        start = uuid.uuid4().hex
        owner = {
            "out": str(out.absolute()),
            "host": socket.gethostname(),
            "started": time.strftime("%Y-%m-%d %H:%M:%S"),
        }
        content = json.dumps({**owner, "start": start}).encode()
        present = self._owner()
        if present is None:
            self.objects.write_new(OWNER, content)
        elif present.get("out") == owner["out"]:
            self.objects.write(OWNER, content)
        self._start = start
        self._check_owner()

    def _owner(self) -> dict[str, Any] | None:
        text = self.objects.read(OWNER)
        if not text:
            return None
        content = parse_json(text)
        if not isinstance(content, dict):
            raise DataError(f"{self.url}/{OWNER} does not name a run. Remove it if no run writes to this store.")
        return content

    def _check_owner(self) -> None:
        """Raise OutputInUse if another start has claimed the store since :meth:`claim`."""
        if self._start is None:
            return
        owner = self._owner() or {}
        if owner.get("start") != self._start:
            who = ", ".join(f"{name}={owner.get(name, '?')}" for name in ("out", "host", "started"))
            raise OutputInUse(
                f"{self.url} is being written by another run ({who}); two runs would mix their checkpoints. Choose "
                f"another checkpoint.store, or remove {self.url}/{OWNER} if that run has ended."
            )

    def begin(self, step: int) -> None:
        """Remove what is not published, and a checkpoint of ``step``, of a branch that the run abandoned."""
        self._check_owner()
        published = self.published()
        complete = published.keys() - {step}
        if step in published:
            self.objects.remove([f"{_name(step)}/{MARKER}"])
        names = [
            name for name in self.objects.sizes() if (match := _FOLDER.match(name)) and int(match[1]) not in complete
        ]
        self.objects.remove(names)

    @contextmanager
    def create(self, step: int, name: str) -> Iterator[IO[bytes]]:
        with self.objects.create(f"{_name(step)}/{name}") as stream:
            yield stream

    def publish(self, staging: Path, step: int, data_sizes: Mapping[str, int], keep: int, best: int | None) -> None:
        """Upload the small files of ``staging``, check that all data files are complete, publish, remove older ones.

        Raises:
            IOFailure: a data file is missing, or has another size than its rank has written.
            OutputInUse: another start has claimed the store.
        """
        folder, sizes = _name(step), dict(data_sizes)
        for path in sorted(staging.rglob("*")):
            if path.is_file():
                name = path.relative_to(staging).as_posix()
                self.objects.upload(path, f"{folder}/{name}")
                sizes[name] = path.stat().st_size
        stored = self.objects.sizes(folder)
        for name, size in sizes.items():
            if stored.get(f"{folder}/{name}") != size:
                raise IOFailure(
                    f"{self.url}/{folder}/{name} has {stored.get(f'{folder}/{name}')} bytes, {size} were written. The "
                    "checkpoint is not published; the one before it is intact."
                )
        self._check_owner()
        before = self.published()
        number = 1 + max((marker.number for marker in before.values()), default=0)
        self.objects.write(f"{folder}/{MARKER}", Published(step, number, sizes).to_json())
        self.remove_old(step, keep, best)

    def remove_old(self, step: int, keep: int, best: int | None) -> None:
        """Keep the newest ``keep`` checkpoints, of which that of ``step`` is the last one, and ``best``."""
        for old in steps_to_remove(self.published(), step, keep, best):
            names = [name for name in self.objects.sizes(_name(old)) if name != f"{_name(old)}/{MARKER}"]
            self.objects.remove([f"{_name(old)}/{MARKER}"])  # a kill leaves no folder that looks complete
            self.objects.remove(names)

    def fetch(self, step: int, root: Path) -> Path:
        """A local folder of the checkpoint in ``root`` without its data files; ranks of a machine share it.

        Raises:
            MissingInput: it is not published.
        """
        marker = self._marker(step)
        folder = checkpoint_dir(root, step)
        root.mkdir(parents=True, exist_ok=True)
        with (root / f"{TEMPORARY}lock").open("w") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX)
            if _origin(folder) == (self.address(step), marker.save_id):
                return folder
            shutil.rmtree(folder, ignore_errors=True)
            staging = root / f"{TEMPORARY}{folder.name}"
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir()
            for name in marker.sizes:
                if not name.endswith(_DATA):
                    _check_name(self.address(step), name)
                    (staging / name).parent.mkdir(parents=True, exist_ok=True)
                    self.objects.download(f"{_name(step)}/{name}", staging / name)
            content = {"url": self.url, "step": step, "save_id": marker.save_id, "sizes": marker.sizes}
            (staging / ORIGIN).write_text(json.dumps(content))
            staging.rename(folder)
        return folder

    def _marker(self, step: int) -> Published:
        marker = self.published().get(step)
        if marker is None:
            raise MissingInput(f"{self.address(step)} is no complete checkpoint: {MARKER} is missing or damaged.")
        return marker

    def download(self, step: int, folder: Path, progress: Callable[[int, int], None]) -> None:
        """Download a checkpoint into ``folder``; files of an interrupted download of it are complete and are kept.

        Args:
            progress: called with (bytes done, total bytes).

        Raises:
            MissingInput: it is not published.
            NoSpace: the disk has less room.
            IOFailure: the store failed, or a file has another size than when it was published.
        """
        marker, origin = self._marker(step), folder / ORIGIN
        with disk_errors(folder):
            if not origin.is_file() or read_json(origin).get("save_id") != marker.save_id:
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                origin.write_text(json.dumps({"save_id": marker.save_id}))
        total, done = sum(marker.sizes.values()), 0
        missing = [name for name in marker.sizes if not (folder / name).is_file()]
        room = shutil.disk_usage(folder).free
        if (needed := sum(marker.sizes[name] for name in missing)) > room:
            raise NoSpace(f"{self.address(step)} needs {needed:,} bytes in {folder}, and {room:,} are free.")
        lock = threading.Lock()

        def count(name: str) -> None:
            nonlocal done
            with lock:
                done += marker.sizes[name]
                progress(done, total)

        def download(name: str) -> None:
            _check_name(self.address(step), name)
            path = folder / name
            partial = path.with_name(f"{TEMPORARY}{path.name}")
            with disk_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                self.objects.download(f"{_name(step)}/{name}", partial)
                if (size := partial.stat().st_size) != marker.sizes[name]:
                    raise IOFailure(
                        f"{self.address(step)}/{name} has {size} bytes, and {marker.sizes[name]} when it was published."
                    )
                partial.rename(path)
            count(name)

        for name in marker.sizes.keys() - set(missing):
            count(name)
        with ThreadPoolExecutor(_THREADS) as pool:
            for _ in pool.map(download, missing):
                pass
        origin.unlink()


def find_checkpoint(url: str) -> tuple[CheckpointStore, int]:
    """The store and the step of a checkpoint, or of the newest one below a URL.

    Raises:
        MissingInput: there is none.
    """
    root, _, name = url.rstrip("/").rpartition("/")
    if match := _FOLDER.fullmatch(name):
        return CheckpointStore(root), int(match[1])
    store = CheckpointStore(url)
    step = store.latest()
    if step is None:
        raise MissingInput(f"{url} has no complete checkpoint. Name an iter_NNNNNNN folder, or the folder of them.")
    return store, step


class StoredData:
    """The data files of a checkpoint whose other files are in a local folder."""

    def __init__(self, origin: Mapping[str, Any]) -> None:
        self._store = CheckpointStore(origin["url"])
        self._folder = _name(origin["step"])
        self.sizes: dict[str, int] = origin["sizes"]
        self.address: str = self._store.address(origin["step"])

    def read(self, name: str, start: int, stop: int) -> bytes:
        return self._store.objects.read(f"{self._folder}/{name}", start, stop)


def stored_data(folder: Path) -> StoredData | None:
    """Where the data files of a checkpoint are; None if they are in ``folder``."""
    path = folder / ORIGIN
    return StoredData(read_json(path)) if path.is_file() else None


def address_of(folder: Path) -> str:
    """The checkpoint in a store, of which ``folder`` is a copy without the data; else the path of ``folder``."""
    data = stored_data(folder)
    return str(folder) if data is None else data.address


_NONE = Published(0, 0, {})


def _name(step: int) -> str:
    return checkpoint_dir(Path(), step).name


def _origin(folder: Path) -> tuple[str, str] | None:
    path = folder / ORIGIN
    if not path.is_file():
        return None
    origin = read_json(path)
    return f"{origin['url']}/{_name(origin['step'])}", origin["save_id"]


def _check_name(address: str, name: str) -> None:
    if name.startswith("/") or ".." in name.split("/"):
        raise DataError(f"{address}/{MARKER} names {name!r}, which is outside of the folder. Do not load it.")
