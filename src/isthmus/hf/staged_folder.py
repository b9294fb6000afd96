"""A folder that appears whole or not at all: written beside its destination, synced, then renamed into place."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from isthmus.atomic_write import TEMPORARY, rename, sync
from isthmus.errors import NoSpace, disk_errors


class StagedFolder:
    """``destination`` in the making.

    One process calls ``create`` and in the end ``publish`` or ``discard`` (or uses it as a context manager that does
    so); any other process that builds it with the same destination may write under ``path`` in between.
    """

    def __init__(self, destination: str | os.PathLike[str], *, replace: bool = False) -> None:
        """Name the destination, and whether a folder that lies there is to go in the end; nothing is touched yet."""
        self.destination = Path(destination).absolute()
        self.replace = replace
        self.path = self.destination.with_name(f"{TEMPORARY}{self.destination.name}")

    def create(self) -> None:
        """Make the folder to write in; what an earlier attempt that was killed left there goes.

        Raises:
            NoSpace: the destination exists, or the disk is full.
            IOFailure: the folder cannot be made.
        """
        self._refuse_existing()
        with disk_errors(self.path):
            if self.path.exists():
                shutil.rmtree(self.path)
            self.path.mkdir(parents=True)

    def publish(self) -> None:
        """Sync every file and the folders, and give the folder its name.

        Raises:
            NoSpace: the destination has come into being meanwhile, or the disk is full.
            IOFailure: syncing or renaming failed.
        """
        self._refuse_existing()
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
        shutil.rmtree(replaced, ignore_errors=True)

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.path, ignore_errors=True)

    def __enter__(self) -> StagedFolder:
        """Create."""
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
            raise NoSpace(f"{self.destination} exists already. Give another folder or remove it.")
