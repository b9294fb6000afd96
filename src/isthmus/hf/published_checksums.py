"""Checks files against published hashes: those of the Hub, in its cache, or a list beside the files."""

from __future__ import annotations

import hashlib
import re
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from isthmus.checked_files import is_trusting
from isthmus.errors import DataError, IOFailure
from isthmus.input_files import read_bytes

_THREADS = 4
_LIST_BYTES = 16 << 20
_ANNOUNCED_BYTES = 1 << 30
_LINE = re.compile(r"([0-9a-fA-F]{64})(?: [ *](.+))?")
"""Of ``sha256sum``: hash and name; files with one hash may have no name."""


def published_hashes(folder: Path) -> dict[Path, str]:
    """The known hashes of files in a folder: SHA-256, or in a cache of the Hub also the SHA-1 of git.

    They are the names of the Hub's blobs, to which a folder in its cache links, and the lines of ``SHA256SUMS``,
    ``sha256sum.txt`` or ``FILE.sha256``. DataError for a list that cannot be read.
    """
    found: dict[Path, str] = {}
    for path in sorted(folder.iterdir()):
        blob = path.resolve() if path.is_symlink() else None
        if blob is not None and blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{40}|[0-9a-f]{64}", blob.name):
            found[path] = blob.name
        elif path.is_file() and (path.suffix == ".sha256" or path.name.lower().startswith("sha256sum")):
            found |= _listed(path)
    return found


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
    wanted: Mapping[Path, str] = {path: known[path] for path in sorted(files)[share::shares] if path in known}
    if not wanted:
        return None
    try:
        num_bytes = sum(path.stat().st_size for path in wanted)
        size = f"{len(wanted)} files, {num_bytes / 2**30:,.2f} GiB"
        if num_bytes >= _ANNOUNCED_BYTES:
            print(f"checking {folder} against its published hashes: {size}", file=sys.stderr, flush=True)
        started_s = time.monotonic()
        with ThreadPoolExecutor(_THREADS) as pool:
            # The largest first, so that no thread begins one at the end.
            largest_first = sorted(wanted, key=lambda path: -path.stat().st_size)
            hashes = pool.map(lambda path: _hash(path, wanted[path]), largest_first)
            for path, found in zip(largest_first, hashes, strict=True):
                if found != wanted[path]:
                    raise DataError(
                        f"{path} is damaged or was changed: its hash is {found}, it was published with {wanted[path]}. "
                        "Download it again, or give --trust if it was changed on purpose."
                    )
    except OSError as error:
        raise IOFailure(f"{folder} cannot be read: {error.strerror or error}.") from error
    return f"{folder}: {size} match their published hashes ({time.monotonic() - started_s:.1f} s)"


def _listed(path: Path) -> dict[Path, str]:
    found: dict[Path, str] = {}
    for line in read_bytes(path, _LIST_BYTES).decode(errors="replace").splitlines():
        if (match := _LINE.fullmatch(line.strip())) is not None:
            name = match[2] or path.name.removesuffix(".sha256")
            if Path(name).name == name.removeprefix("./") and name not in (path.name, ".."):
                found[path.parent / Path(name).name] = match[1].lower()
    return found


def _hash(path: Path, expected: str) -> str:
    """In the algorithm of ``expected``: SHA-256, or git's SHA-1 of a blob."""
    state = hashlib.sha256() if len(expected) == 64 else hashlib.sha1(f"blob {path.stat().st_size}\0".encode())
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            state.update(part)
    return state.hexdigest()
