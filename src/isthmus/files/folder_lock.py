"""A lock on an output, so that two commands do not write it at the same time.

The lock is of the process (``fcntl``): the kernel releases it when the process ends, however it ends, and a network
file system passes it to its server. The file names the holder for the others. Machines that share a file system without
such locks, or with locks that are local to a machine (Lustre with ``localflock``), do not see each other's.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from isthmus.errors import OutputInUse, disk_errors

LOCK = ".lock"
"""Name of the file in a folder, or suffix of its name beside an output."""
_WAIT_S = 5.0
"""A command that is about to end is waited for."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


class FolderLock:
    def __init__(self, path: Path, output: Path, *, shared: bool = False) -> None:
        """``path`` is the file; ``output`` what it locks, for the message. Holders of ``shared`` locks share it."""
        self.path = path
        self._output = output
        self._shared = shared
        self._file: int | None = None

    def acquire(self) -> None:
        """Lock, also create the folder of the file, which the holder before may remove.

        Raises:
            OutputInUse: another process holds the lock.
            NoSpace: the disk is full.
            IOFailure: the file cannot be written.
        """
        deadline_s = time.monotonic() + _WAIT_S
        with disk_errors(self.path):
            while self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                try:
                    self._lock(file)
                    with suppress(FileNotFoundError):  # the holder before may have removed the file that is open here
                        if os.path.samestat(os.fstat(file), os.stat(self.path)):
                            self._file = file
                except BlockingIOError:
                    if time.monotonic() > deadline_s:
                        raise OutputInUse(f"{self._output} {self._described(file)}") from None
                    time.sleep(0.1)
                finally:
                    if self._file is None:
                        os.close(file)
            command = shlex.join(["isthmus", *sys.argv[1:]])[:200]
            started = time.strftime("%Y-%m-%d %H:%M:%S")
            holder = {"host": socket.gethostname(), "pid": os.getpid(), "started": started, "command": command}
            with suppress(OSError):  # only for messages
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, json.dumps(holder).encode(), 0)

    def release(self) -> None:
        """Remove the file, unless others may share the lock; does nothing without the lock."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                if not self._shared:
                    self.path.unlink()
            os.close(file)

    def _lock(self, file: int) -> None:
        """Raises BlockingIOError if another process has the lock."""
        try:
            fcntl.lockf(file, (fcntl.LOCK_SH if self._shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except PermissionError as error:  # EACCES, on some systems
            raise BlockingIOError from error
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise
            if self._shared:
                return
            # Without locks, a living process on this machine is still found.
            holder = _holder(file)
            if holder.get("host") == socket.gethostname() and _is_running(holder.get("pid")):
                raise BlockingIOError from error

    def _described(self, file: int) -> str:
        holder = {name: str(value) for name, value in _holder(file).items()}
        pid, host = holder.get("pid", "?"), holder.get("host", "?")
        who = f"process {pid} on {host}, since {holder.get('started', '?')}: {holder.get('command', '?')}"
        return f"is being written by {who}. Wait until it ends or stop it, or choose another output."

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create a folder and lock it for the block; a new folder that is empty at the end is removed."""
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with FolderLock(folder / LOCK, folder):
            yield
    finally:
        for path in created:
            with suppress(OSError):  # in use
                path.rmdir()


def writer_of(folder: Path) -> str | None:
    """The host of the process that writes a folder, from its lock; None without a lock, or if the process has ended.

    Only reads, so a process on another machine counts as running until its lock is removed.
    """
    try:
        file = os.open(folder / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        holder = _holder(file)
    finally:
        os.close(file)
    if not holder or (holder.get("host") == socket.gethostname() and not _is_running(holder.get("pid"))):
        return None
    return str(holder.get("host", "?"))


def _holder(file: int) -> dict[str, object]:
    with suppress(ValueError, OSError):
        content = json.loads(os.pread(file, 4096, 0))
        if isinstance(content, dict):
            return content
    return {}


def _is_running(pid: object) -> bool:
    if not isinstance(pid, int) or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True
    return True
