"""Checks files against published hashes: those of the Hub, in its cache, or a list beside the files.

A large model takes minutes to hash. A file that matched is not hashed again until its size, inode or a time of it
changes; ``checked/`` in :func:`isthmus.files.atomic_write.cache_folder` has an empty file for each.
"""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from isthmus.errors import DataError, IOFailure
from isthmus.files.atomic_write import cache_folder
from isthmus.files.checked_files import is_trusting
from isthmus.files.input_files import read_bytes

_THREADS = 4
_LIST_BYTES = 16 << 20
_ANNOUNCED_BYTES = 1 << 30
_SETTLED_S = 10
"""A file that changed less than this ago is not remembered: it could change again within a tick of its times."""
_LINE = re.compile(r"([0-9a-fA-F]{64})(?: [ *](.+))?")
"""Line of ``sha256sum``: hash and name; files with one hash may have no name."""


def published_hashes(folder: Path) -> dict[Path, str]:
    """The known hashes of files in a folder: SHA-256, or in a cache of the Hub also the SHA-1 of git.

    They are the names of the Hub's blobs, to which a folder in its cache links, and the lines of ``SHA256SUMS``,
    ``sha256sum.txt`` or ``FILE.sha256``. DataError for a list that cannot be read.
    """
    hashes: dict[Path, str] = {}
    for path in sorted(folder.iterdir()):
        blob = path.resolve() if path.is_symlink() else None
        if blob is not None and blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
            hashes[path] = blob.name
        elif path.is_file() and (path.suffix == ".sha256" or path.name.lower().startswith("sha256sum")):
            hashes |= _listed(path)
    return hashes


def check_published(folder: Path, files: Iterable[Path], *, share: int = 0, shares: int = 1) -> str | None:
    """Check the files whose hash was published with them; returns a line for the user, None without such hashes.

    Args:
        folder: contains the files.
        files: what is going to be read.
        share, shares: processes of one machine that call it each check the files of one share.

    Raises:
        DataError: a file differs.
        IOFailure: reading failed.
    """
    known = {} if is_trusting() else published_hashes(folder)
    try:
        markers = {path: _marker(path, known[path]) for path in sorted(files)[share::shares] if path in known}
        if not markers:
            return None
        # The largest first, so that no thread begins one at the end.
        unknown = sorted(
            (path for path in markers if not markers[path].exists()), key=lambda path: -path.stat().st_size
        )
        num_bytes = sum(path.stat().st_size for path in unknown)
        if num_bytes >= _ANNOUNCED_BYTES:
            size = f"{len(unknown)} files, {num_bytes / 2**30:,.2f} GiB"
            print(f"checking {folder} against its published hashes: {size}", file=sys.stderr, flush=True)
        started_s = time.monotonic()
        with ThreadPoolExecutor(_THREADS) as pool:
            hashes = pool.map(lambda path: _hash(path, known[path]), unknown)
            for path, actual in zip(unknown, hashes, strict=True):
                if actual != known[path]:
                    raise DataError(
                        f"{path} is damaged or was changed: its hash is {actual}, it was published with {known[path]}. "
                        "Download it again, or give --trust if it was changed on purpose."
                    )
                _remember(path, known[path], markers[path])
    except OSError as error:
        raise IOFailure(f"{folder} cannot be read: {error.strerror or error}.") from error
    num_bytes = sum(path.stat().st_size for path in markers)
    size = f"{len(markers)} files, {num_bytes / 2**30:,.2f} GiB"
    before = f", {len(markers) - len(unknown)} of them checked before" if len(unknown) < len(markers) else ""
    return f"{folder}: {size} match their published hashes{before} ({time.monotonic() - started_s:.1f} s)"


def _marker(path: Path, expected: str) -> Path:
    """The file that exists if ``path`` had the hash, and did not change since then."""
    file = path.resolve()
    status = file.stat()
    identity = [str(file), status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns, expected]
    return cache_folder() / "checked" / hashlib.blake2b(repr(identity).encode(), digest_size=16).hexdigest()


def _remember(path: Path, expected: str, marker: Path) -> None:
    """Create the marker, if ``path`` is as it was before it was hashed."""
    status = path.stat()
    if time.time() - max(status.st_mtime, status.st_ctime) >= _SETTLED_S and _marker(path, expected) == marker:
        with suppress(OSError):  # a home that cannot be written to
            marker.parent.mkdir(parents=True, exist_ok=True)
            marker.touch()


def _listed(path: Path) -> dict[Path, str]:
    hashes: dict[Path, str] = {}
    for line in read_bytes(path, _LIST_BYTES).decode(errors="replace").splitlines():
        if (match := _LINE.fullmatch(line.strip())) is not None:
            name = match[2] or path.name.removesuffix(".sha256")
            if Path(name).name == name.removeprefix("./") and name not in (path.name, ".."):
                hashes[path.parent / Path(name).name] = match[1].lower()
    return hashes


def _hash(path: Path, expected: str) -> str:
    """In the algorithm of ``expected``: SHA-256, or git's SHA-1 of a blob."""
    state = hashlib.sha256() if len(expected) == 64 else hashlib.sha1(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            state.update(part)
    return state.hexdigest()
