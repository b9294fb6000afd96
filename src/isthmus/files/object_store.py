"""Folders in object stores (``s3://bucket/folder``), through fsspec; ``file://`` and others of fsspec too.

An object exists once its upload has ended, but there is no rename of folders and no lock: what belongs together is
published by an object that is written last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from isthmus.errors import IOFailure, IsthmusError
from isthmus.files.remote_files import file_system


class ObjectStore:
    """The objects below a URL, by their path relative to it. Methods raise IOFailure."""

    def __init__(self, url: str) -> None:
        """Raises UsageError if the kind of URL is unknown, or its package is missing."""
        self.url: str = url.rstrip("/")
        # Listings are those of the moment: other processes write and remove objects.
        self._fs, self._root = file_system(self.url, use_listings_cache=False)

    @contextmanager
    def create(self, name: str) -> Iterator[IO[bytes]]:
        """A stream into a new object, or in place of an old one."""
        with self._errors(name):
            path = self._path(name)
            if "file" in self._protocols:
                self._fs.makedirs(self._fs._parent(path), exist_ok=True)
            with self._fs.open(path, "wb") as stream:
                yield stream

    def write(self, name: str, content: bytes) -> None:
        with self.create(name) as stream:
            stream.write(content)

    def write_new(self, name: str, content: bytes) -> None:
        """Write an object unless it exists: in one request, where store and package have conditional writes."""
        with self._errors(name):
            path = self._path(name)
            if "file" in self._protocols:
                self._fs.makedirs(self._fs._parent(path), exist_ok=True)
            try:
                self._fs.pipe_file(path, content, mode="create")
            except Exception as error:  # stores refuse with different errors
                if self._fs.exists(path):
                    return
                if not isinstance(error, TypeError):
                    raise
                self._fs.pipe_file(path, content)  # fsspec before 2025 has no mode

    def upload(self, path: Path, name: str) -> None:
        with path.open("rb") as file, self.create(name) as stream:
            while block := file.read(1 << 24):
                stream.write(block)

    def download(self, name: str, path: Path) -> None:
        with self._errors(name):
            self._fs.get_file(self._path(name), str(path))

    def read(self, name: str, start: int | None = None, stop: int | None = None) -> bytes:
        """The object, or its bytes ``start`` to ``stop``; b"" if there is none."""
        with self._errors(name):
            try:
                content: bytes = self._fs.cat_file(self._path(name), start=start, end=stop)
            except FileNotFoundError:
                return b""
            return content

    def sizes(self, folder: str = "") -> dict[str, int]:
        """Bytes of all objects in ``folder`` and below it, by path relative to the store."""
        with self._errors(folder):
            self._fs.invalidate_cache()
            objects = self._fs.find(self._path(folder), detail=True)
            return {path[len(self._root) :].lstrip("/"): int(info["size"] or 0) for path, info in objects.items()}

    def remove(self, names: Iterable[str]) -> None:
        """Remove objects that exist."""
        if paths := [self._path(name) for name in names]:
            with self._errors(""):
                self._fs.rm(paths)

    @property
    def _protocols(self) -> tuple[str, ...]:
        protocol: Any = self._fs.protocol
        return (protocol,) if isinstance(protocol, str) else tuple(protocol)

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    @contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        try:
            yield
        except IsthmusError:
            raise
        except Exception as error:  # each kind of store has exceptions of its own
            reason = " ".join(str(error).split()) or type(error).__name__
            raise IOFailure(f"{self.url}/{name}: {reason[:300]}") from error
