"""What is not a tensor in a checkpoint: the file ``common.pt``, or since megatron-core 0.19 an object in the index.

Isthmus writes the file, which megatron-core 0.16 to 0.19 read, and the object as well if the installed version does.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject

from isthmus.engine.checkpoint.checkpoint_index import CheckpointIndex
from isthmus.engine.tensor_names import COMMON_FILE, COMMON_OBJECT
from isthmus.errors import DataError
from isthmus.files.checked_files import ChecksumVerifier


def common_object(content: dict[str, Any], rank: int) -> ShardedObject:
    """``content``, which all ranks have, as an object that rank 0 writes."""
    return ShardedObject(COMMON_OBJECT.partition("/")[0], content, (1,), (0,), replica_id=rank)


def has_common_state(folder: Path, index: CheckpointIndex) -> bool:
    return (folder / COMMON_FILE).is_file() or COMMON_OBJECT in index.objects


def read_common_state(folder: Path, index: CheckpointIndex, verifier: ChecksumVerifier) -> dict[str, Any]:
    """Read it without running code from it.

    Raises:
        DataError: the block of the object is damaged, or the object is none.
        Exception: those of ``torch.load``.
    """
    if (file := folder / COMMON_FILE).is_file():
        verifier.check(file)
        state = torch.load(file, map_location="cpu", weights_only=True)
    else:
        number, offset, length = index.objects[COMMON_OBJECT]  # such checkpoints are not in stores
        path = folder / index.files[number]
        verifier.check(path, offset, offset + length)
        with path.open("rb") as opened:
            opened.seek(offset)
            (state,) = torch.load(io.BytesIO(opened.read(length)), map_location="cpu", weights_only=True)
    if not isinstance(state, dict):
        raise DataError(f"the common state of {folder} is a {type(state).__name__}. Resume from another checkpoint.")
    return state
