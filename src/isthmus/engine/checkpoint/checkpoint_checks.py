"""What is checked of the files of a checkpoint before they are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from isthmus.engine.checkpoint.common_state import has_common_state
from isthmus.engine.checkpoint.index_file import INDEX, read_index
from isthmus.engine.tensor_names import COMMON_FILE
from isthmus.errors import DataError, MissingInput
from isthmus.files.checked_files import ChecksumVerifier
from isthmus.files.folder_links import check_links

_THREADS = 4


def check_folder(folder: Path, verifier: ChecksumVerifier) -> None:
    """Check index, common state and sizes; on rank 0 also the model files beside them.

    Raises:
        MissingInput: the folder or its index is missing.
        DataError: a file is missing, truncated or damaged.
    """
    with _alternative():
        for name in (INDEX, COMMON_FILE, "metadata.json"):
            if (folder / name).exists():
                verifier.check(folder / name)
    check_files(folder)
    with _alternative():
        verifier.check_complete(folder)
        for path in sorted(folder.rglob("*")) if dist.get_rank() == 0 else ():
            if path.is_file() and path.suffix != ".distcp":
                verifier.check(path)


def check_files(folder: Path) -> None:
    """Check that all files exist and have the length in the index.

    Raises:
        MissingInput: the folder or its index is missing.
        DataError: a file is missing or truncated, or the index is unreadable.
        UnsafeInput: the index would run code.
    """
    if not (folder / INDEX).is_file():
        raise MissingInput(
            f"{folder} has no torch_dist checkpoint: .metadata is missing. Choose a folder that has one."
        )
    check_links(folder)
    index = read_index(folder)
    if not has_common_state(folder, index):
        raise DataError(f"{folder / COMMON_FILE} is missing. Resume from another checkpoint.")
    ends: dict[str, int] = {}
    for entry in index.storage_data.values():
        ends[entry.relative_path] = max(ends.get(entry.relative_path, 0), entry.offset + entry.length)
    for name, end in ends.items():
        size = (folder / name).stat().st_size if (folder / name).is_file() else -1
        if size < end:
            problem = "is missing" if size < 0 else f"has {size} bytes"
            raise DataError(f"{folder / name} {problem}, {end} are needed. Resume from another checkpoint.")


def check_entries(folder: Path, entries: Iterable[Any], verifier: ChecksumVerifier) -> None:
    """Check the blocks of ``.distcp`` files that have a part of ``entries``, in threads.

    Raises:
        DataError: a block is damaged; names file and tensor.
    """
    if not verifier.has_list(folder):
        return
    index = read_index(folder)

    def check(stored: MetadataIndex) -> None:
        place = index.storage_data[stored]
        end = place.offset + place.length
        verifier.check(folder / place.relative_path, place.offset, end, tensor=stored.fqn)

    with _alternative(), ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(check, dict.fromkeys(part for entry in entries for part in _stored_parts(entry, index))):
            pass


@contextmanager
def _alternative() -> Iterator[None]:
    try:
        yield
    except DataError as error:
        raise DataError(f"{error} Or resume from another checkpoint: checkpoint.resume=PATH.") from error


def _stored_parts(entry: Any, index: Metadata) -> Iterator[MetadataIndex]:
    """Where the checkpoint has the elements of ``entry``; none if its key is missing, which loading reports."""
    if isinstance(entry, ShardedObject):
        if (place := MetadataIndex(entry.unique_key)) in index.storage_data:
            yield place
    if not isinstance(entry, ShardedTensor):
        return
    stored = index.state_dict_metadata.get(entry.key)
    for chunk in stored.chunks if isinstance(stored, TensorStorageMetadata) else ():
        ranges = zip(entry.global_offset, (1,) * entry.prepend_axis_num + tuple(entry.local_shape), strict=True)
        if all(
            start < offset + size and offset < start + length
            for (start, length), offset, size in zip(ranges, chunk.offsets, chunk.sizes, strict=False)
        ):
            yield MetadataIndex(entry.key, chunk.offsets)
