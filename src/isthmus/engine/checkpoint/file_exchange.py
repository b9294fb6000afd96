"""Copies files between machines through the collectives of a run, without a file system that they share."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isthmus.engine.checkpoint.checkpoint_folder import write_errors
from isthmus.engine.parallel.process_groups import agree

_CHUNK_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class FileTransfer:
    """A file that the rank ``source`` reads and the rank ``target`` writes, on another machine."""

    name: str
    num_bytes: int
    source: int
    target: int


def exchange_files(folder: Path, transfers: Sequence[FileTransfer], group: dist.ProcessGroup) -> None:
    """Copy files from a machine's ``folder`` to the same folder of another machine; a collective of all ranks.

    Args:
        folder: of this machine; both ends of a transfer may have different paths.
        transfers: the same on every rank.
        group: all ranks, on the host.

    Raises:
        NoSpace, IOFailure: on every rank, if any rank cannot write.
    """
    rank = dist.get_rank()
    # The space is reserved first: a write to mapped memory of a full file system ends the process (SIGBUS).
    agree(lambda: _reserve(folder, [transfer for transfer in transfers if transfer.target == rank]), group)
    started: list[Any] = []
    tag = 0
    for transfer in transfers:
        tags = range(tag, tag := tag + -(-transfer.num_bytes // _CHUNK_BYTES))
        if not tags or rank not in (transfer.source, transfer.target):
            continue
        content = torch.from_file(
            str(folder / transfer.name), shared=True, size=transfer.num_bytes, dtype=torch.uint8
        )  # mapped
        for number, chunk in zip(tags, content.split(_CHUNK_BYTES), strict=True):
            if rank == transfer.source:
                started.append(dist.isend(chunk, transfer.target, group=group, tag=number))
            else:
                started.append(dist.irecv(chunk, transfer.source, group=group, tag=number))
    # Other ranks of a machine may read what this one has received.
    agree(lambda: _wait(started), group)


def _reserve(folder: Path, transfers: Sequence[FileTransfer]) -> None:
    with write_errors(folder):
        for transfer in transfers:
            with (folder / transfer.name).open("wb") as file:
                if transfer.num_bytes:
                    os.posix_fallocate(file.fileno(), 0, transfer.num_bytes)


def _wait(started: Sequence[Any]) -> None:
    for work in started:
        work.wait()
