"""Files at a URL, such as ``s3://bucket/name``, through fsspec; and folders that are on a disk or at a URL."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from isthmus.errors import IOFailure, IsthmusError, MissingInput, UsageError
from isthmus.files.atomic_write import write_atomic

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_BUFFER_BYTES = 1 << 20
_CONTENT_KEYS = ("ETag", "etag", "md5Hash", "blob_id", "Content-MD5")
"""Keys under which storage names the content of a file."""


def is_url(name: Path | str) -> bool:
    """Whether a name is a URL that fsspec opens, such as ``s3://``, ``gs://``, ``hf://`` or ``hdfs://``."""
    return _URL.match(str(name)) is not None


def is_store_url(name: Path | str) -> bool:
    """Whether a name is a URL of storage that lists its files, which ``https://`` does not."""
    return is_url(name) and not str(name).lower().startswith(("http://", "https://"))


def refuse_url(name: Path | str) -> None:
    """Raise UsageError for the URL of a store where a folder is needed; a ``Path`` of a URL has one slash fewer."""
    match = re.fullmatch(r"(?!https?:)([A-Za-z][A-Za-z0-9+.-]+):/+(.+)", str(name))
    if match is not None and not Path(name).exists():
        url = f"{match[1]}://{'/' if match[1] == 'file' else ''}{match[2]}"
        raise UsageError(
            f"{url} is in a store, and this command reads folders. For a checkpoint of a run, make a model folder "
            f"first: isthmus convert {url} DST --to hf"
        )


def file_system(url: str, **options: Any) -> tuple[Any, str]:
    """(file system, path in it), with options of fsspec; UsageError for an unknown scheme or a missing library."""
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, ValueError) as error:  # fsspec names the library that opens the scheme
        raise UsageError(
            f"{url} cannot be opened: {error}. Install the library that fsspec needs for it (s3fs for s3://, gcsfs for "
            "gs://, adlfs for az://), or correct the URL."
        ) from error
    except Exception as error:  # of the library, for missing credentials or an unknown server
        raise IOFailure(f"{url} cannot be opened: {type(error).__name__}: {error}.") from error
    return system, str(path)


@contextmanager
def remote_errors(url: str) -> Iterator[None]:
    """Turn errors of the storage into those for the user: MissingInput or IOFailure."""
    try:
        yield
    except IsthmusError:
        raise
    except FileNotFoundError as error:
        raise MissingInput(f"{url}: no such file.") from error
    except Exception as error:  # libraries of storage have their own classes
        raise IOFailure(f"{url}: the storage failed: {type(error).__name__}: {error}.") from error


def open_binary(name: Path | str) -> io.BufferedReader:
    """Open a file on the disk or at a URL for reading."""
    if not is_url(name):
        return Path(name).open("rb")
    system, path = file_system(str(name))
    with remote_errors(str(name)):
        return io.BufferedReader(system.open(path, "rb"), _BUFFER_BYTES)


def file_bytes(name: Path | str) -> int:
    """Size of a file on the disk or at a URL."""
    if not is_url(name):
        return Path(name).stat().st_size
    system, path = file_system(str(name))
    with remote_errors(str(name)):
        return int(system.size(path))


def remote_version(url: str) -> str:
    """A text that changes with the content of a file: its ETag or hash at the storage, else size and time."""
    system, path = file_system(url)
    with remote_errors(url):
        info = system.info(path)
        for key in _CONTENT_KEYS:
            if info.get(key):
                return f"{key} {info[key]}"
        return f"{info['size']} bytes, {system.modified(path)}"


class Folder(Protocol):
    """The files of a folder, without its subfolders."""

    def names(self) -> list[str]:
        """Sorted names of the files."""

    def read(self, name: str) -> bytes | None:
        """Content of a file; None if it does not exist."""

    def write(self, name: str, content: bytes) -> None:
        """Write a file; a reader gets the old content or the complete new one, if the storage is atomic."""

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""


class DiskFolder:
    """A :class:`Folder` on a disk."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def names(self) -> list[str]:
        return sorted(path.name for path in self.path.iterdir()) if self.path.is_dir() else []

    def read(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / name, content)

    def remove(self, name: str) -> None:
        (self.path / name).unlink(missing_ok=True)


class RemoteFolder:
    """A :class:`Folder` at a URL; object stores replace a file as a whole, other storage may leave a part of it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._system, self._path = file_system(url)

    def names(self) -> list[str]:
        with remote_errors(self.url):
            self._system.invalidate_cache()
            try:
                paths = self._system.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
            return sorted(name for path in paths if (name := path.rstrip("/").rpartition("/")[2]))

    def read(self, name: str) -> bytes | None:
        with remote_errors(f"{self.url}/{name}"):
            try:
                return bytes(self._system.cat_file(f"{self._path}/{name}"))
            except FileNotFoundError:
                return None

    def write(self, name: str, content: bytes) -> None:
        with remote_errors(f"{self.url}/{name}"):
            self._system.makedirs(self._path, exist_ok=True)
            self._system.pipe_file(f"{self._path}/{name}", content)

    def remove(self, name: str) -> None:
        with remote_errors(f"{self.url}/{name}"), suppress(FileNotFoundError):
            self._system.rm_file(f"{self._path}/{name}")

    def remove_all(self) -> None:
        """Remove the folder."""
        with remote_errors(self.url), suppress(FileNotFoundError):
            self._system.rm(self._path, recursive=True)


def open_folder(name: str) -> Folder:
    return RemoteFolder(name) if is_url(name) else DiskFolder(Path(name))


def upload(source: Path, url: str) -> None:
    """Copy a file of the disk to a URL."""
    system, path = file_system(url)
    with remote_errors(url):
        system.makedirs(path.rpartition("/")[0], exist_ok=True)
        system.put_file(str(source), path)


def exists(url: str) -> bool:
    system, path = file_system(url)
    with remote_errors(url):
        system.invalidate_cache()
        return bool(system.exists(path))
