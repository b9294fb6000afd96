"""Folders of copies in memory, as ranks of several machines see them."""

from __future__ import annotations

import socket
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from isthmus.config.schema import ParallelConfig
from isthmus.engine.checkpoint.file_exchange import FileTransfer, exchange_files
from isthmus.engine.checkpoint.memory_copies import open_copies
from isthmus.engine.parallel.process_groups import gather_objects, open_groups
from isthmus.errors import UsageError
from ranks.pool_worker import platform


def machines(*, folder: str, separate: bool, hosts: bool) -> tuple[list[list[int]], str]:
    """The machines that two ranks detect, and the error of a folder that two hosts share."""
    open_groups(ParallelConfig(), platform(), seed=0)
    memory = Path(folder, str(dist.get_rank())) if separate else Path(folder)
    memory.mkdir(exist_ok=True)
    (memory / "isthmus-name-earlier").mkdir(exist_ok=True)
    host = f"host-{dist.get_rank()}" if hosts else "host"
    with patch.object(socket, "gethostname", lambda: host):
        try:
            copies = open_copies(memory, "isthmus-name", "id", timeout_s=60.0)
        except UsageError as error:
            return [], str(error)
    assert sorted(path.name for path in memory.iterdir() if path.name.startswith("isthmus")) == ["isthmus-name-id"]
    return [list(ranks) for ranks in copies.machines], ""


def exchanged(*, folder: str) -> list[bool]:
    """Whether files of several sizes arrive, both ways at once and in chunks."""
    open_groups(ParallelConfig(), platform(), seed=0)
    rank, memory = dist.get_rank(), Path(folder, f"exchange-{dist.get_rank()}")
    memory.mkdir()
    sizes = [0, 1, 1000, 2500]
    content = [
        [torch.arange(size).add(source).to(torch.uint8).numpy().tobytes() for size in sizes] for source in (0, 1)
    ]
    transfers = []
    for source in (0, 1):
        for number, size in enumerate(sizes):
            name = f"{source}-{number}"
            transfers.append(FileTransfer(name, size, source, 1 - source))
            if source == rank:
                (memory / name).write_bytes(content[source][number])
    with patch("isthmus.engine.checkpoint.file_exchange._CHUNK_BYTES", 1000):
        exchange_files(memory, transfers, dist.group.WORLD)
    received = [(memory / f"{1 - rank}-{number}").read_bytes() for number in range(len(sizes))]
    return gather_objects(received == content[1 - rank])
