"""Brings to rank 0 what each rank has written of a checkpoint: parts, if they changed, and checksums of its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch.distributed as dist

from isthmus.engine.checkpoint.checkpoint_index import CheckpointIndex, compressed_index, merged_index
from isthmus.files.file_checksums import FileChecksums


@dataclass(frozen=True, slots=True)
class GatheredParts:
    """What rank 0 has of all ranks."""

    parts: list[bytes]
    """Compressed parts of each rank; empty on other ranks than the first."""
    checksums: dict[str, FileChecksums]

    def index(self) -> CheckpointIndex:
        """Raises as :func:`isthmus.engine.checkpoint.checkpoint_index.merged_index`."""
        return merged_index(self.parts)


class PartsGather:
    """The gather of all saves of a run. A rank whose parts are those of the save before sends only checksums."""

    def __init__(self) -> None:
        self._sent: bytes | None = None
        self._parts: list[bytes] = []
        self.num_sent: int = 0
        """How often this rank has sent its parts."""

    def gather(
        self, parts: CheckpointIndex, checksums: Mapping[str, FileChecksums], group: dist.ProcessGroup | None = None
    ) -> GatheredParts:
        """A collective of ``group``; the result is complete on rank 0."""
        content, main = compressed_index(parts), dist.get_rank() == 0
        changed = None if content == self._sent else content
        received: list[tuple[bytes | None, dict[str, FileChecksums]]] | None = None
        if main:
            received = [(None, {})] * dist.get_world_size(group)
        dist.gather_object((changed, dict(checksums)), received, dst=0, group=group)
        self._sent = content
        self.num_sent += changed is not None
        if received is None:
            return GatheredParts([], {})
        known = self._parts or [b""] * len(received)
        self._parts = [old if new is None else new for old, (new, _) in zip(known, received, strict=True)]
        return GatheredParts(self._parts, {name: file for _, files in received for name, file in files.items()})
