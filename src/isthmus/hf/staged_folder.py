"""Atomic folder writes: the folder is written beside its destination, synced, then renamed."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from isthmus.errors import OutputExists, disk_errors
from isthmus.files.atomic_write import TEMPORARY, rename, sync
from isthmus.files.file_checksums import Parts, write_checksums
from isthmus.files.folder_lock import LOCK, FolderLock


class StagedFolder:
    """A folder that becomes ``destination``.

    One process calls ``create``, and at the end ``publish`` or ``discard``, or uses it as a context manager. Other
    processes with the same destination may write under ``path`` in between.
    """

    def __init__(self, destination: str | os.PathLike[str], *, replace: bool = False) -> None:
        self.destination: Path = Path(destination).absolute()
        self.replace = replace
        self.path: Path = self.destination.with_name(f"{TEMPORARY}{self.destination.name}")
        self._lock = FolderLock(self.path.with_name(f"{self.path.name}{LOCK}"), self.destination)
        self._is_created = False
        self.parts: list[Parts] = []
        """Hashes that were made while writing, of all processes."""
        self.about: dict[str, Any] = {}
        """Further content of ``checksums.json``."""

    def create(self) -> None:
        """Create the temporary folder and lock it; removes that of an earlier process that was killed."""
        if not self._lock.path.exists():  # else of a process that is about to end, or was killed: it is removed
            self._refuse_existing()
        self._lock.acquire()
        self._is_created = True
        try:
            self._refuse_existing()
            with disk_errors(self.path):
                if self.path.exists():
                    shutil.rmtree(self.path)
                self.path.mkdir()
        except BaseException:
            self.discard()
            raise

    def publish(self) -> None:
        """Write the checksums, sync all files and folders, and rename the folder."""
        self._refuse_existing()
        write_checksums(self.path, self.parts, about=self.about)
        with disk_errors(self.path):
            for folder, _, files in os.walk(self.path, topdown=False):
                for name in files:
                    sync(Path(folder, name))
                sync(Path(folder))
            replaced = self.destination.with_name(f"{TEMPORARY}replaced-{self.destination.name}")
            shutil.rmtree(replaced, ignore_errors=True)
            if self.destination.is_dir():
                self.destination.rename(replaced)
            rename(self.path, self.destination)
            self._lock.release()  # not before: another process would remove the folder
        shutil.rmtree(replaced, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was created."""
        if self._is_created:
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()

    def __enter__(self) -> StagedFolder:
        self.create()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Publish, or discard after an error."""
        if kind is None:
            try:
                self.publish()
            except BaseException:
                self.discard()
                raise
        else:
            self.discard()

    def _refuse_existing(self) -> None:
        if os.path.lexists(self.destination) and not (self.replace and self.destination.is_dir()):
            raise OutputExists(f"{self.destination} exists already. Give another folder or remove it.")
