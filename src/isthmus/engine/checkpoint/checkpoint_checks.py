"""What is checked of the files of a checkpoint before they are loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from isthmus.engine.checkpoint.checkpoint_index import CheckpointIndex
from isthmus.engine.checkpoint.checkpoint_store import StoredData, stored_data
from isthmus.engine.checkpoint.common_state import has_common_state
from isthmus.engine.checkpoint.index_file import INDEX, read_index
from isthmus.engine.tensor_names import COMMON_FILE
from isthmus.errors import DataError, MissingInput, UnsafeInput
from isthmus.files.checked_files import ChecksumVerifier
from isthmus.files.folder_links import check_links, is_within


def check_folder(folder: Path, verifier: ChecksumVerifier) -> CheckpointIndex:
    """Check index, common state, sizes and the model files beside them; returns the index.

    Raises:
        MissingInput: the folder or its index is missing.
        DataError: a file is missing, truncated or damaged.
        UnsafeInput: the index would run code, or a link leads out of the folder.
    """
    with alternative():
        for name in (INDEX, COMMON_FILE, "metadata.json"):
            if (folder / name).exists():
                verifier.check(folder / name)
    data = stored_data(folder)
    index = check_files(folder) if data is None else read_index(folder)
    if data is not None:
        check_stored_sizes(data, index.ends())
    with alternative():
        verifier.check_complete(folder, only=lambda name: data is None or not name.endswith(".distcp"))
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix != ".distcp":
                verifier.check(path)
    return index


def check_files(folder: Path) -> CheckpointIndex:
    """Check that all files exist and have the length in the index; returns the index.

    Raises:
        MissingInput: the folder or its index is missing.
        DataError: a file is missing or truncated, or the index is unreadable.
        UnsafeInput: the index would run code, or a link leads out of the folder.
    """
    if not (folder / INDEX).is_file():
        raise MissingInput(
            f"{folder} has no torch_dist checkpoint: .metadata is missing. Choose a folder that has one."
        )
    check_links(folder)
    index = read_index(folder)
    if not has_common_state(folder, index):
        raise DataError(f"{folder / COMMON_FILE} is missing. Resume from another checkpoint.")
    check_sizes(folder, index.ends())
    return index


def check_sizes(folder: Path, ends: Mapping[str, int]) -> None:
    """Check that files are in the folder and have these numbers of bytes at least.

    Raises:
        DataError: a file is missing or truncated.
        UnsafeInput: the index names a file outside of the folder.
    """
    for name, end in ends.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else -1
        if size >= 0 and not is_within(folder, path.resolve()):
            raise UnsafeInput(f"{folder / INDEX} names {name}, which is outside of the folder. Do not load it.")
        if size < end:
            problem = "is missing" if size < 0 else f"has {size} bytes"
            raise DataError(f"{path} {problem}, {end} are needed. Resume from another checkpoint.")


def check_stored_sizes(data: StoredData, ends: Mapping[str, int]) -> None:
    """As :func:`check_sizes`, of data files in an object store, by their sizes when they were published."""
    for name, end in ends.items():
        if (size := data.sizes.get(name, -1)) < end:
            problem = "is missing" if size < 0 else f"has {size} bytes"
            raise DataError(f"{data.address}/{name} {problem}, {end} are needed. Resume from another checkpoint.")


@contextmanager
def alternative() -> Iterator[None]:
    """Add to a DataError how to resume without the damaged checkpoint."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{error} Or resume from another checkpoint: checkpoint.resume=PATH.") from error
