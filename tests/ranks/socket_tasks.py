"""Sockets of the process groups of a rank."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from isthmus.config.schema import ParallelConfig
from isthmus.engine.checkpoint.background_saves import Saves
from isthmus.engine.parallel.process_groups import gather_objects, open_groups
from isthmus.engine.upstream.compat import _devices_of
from isthmus.platforms.gpu import LAZY_GLOO
from ranks.pool_worker import platform


def sockets() -> dict[str, int]:
    """New sockets for the groups of a run, and on GPUs for the group of asynchronous saves after a gather."""
    before = _open_sockets()
    parallel = ParallelConfig()
    open_groups(parallel, platform(), seed=0)
    run = _open_sockets()
    os.environ.update({name: value for name, (value, _) in LAZY_GLOO.items()})
    _devices_of.cache_clear()  # lazy or not is a property of the device, which all groups of a CPU share
    try:
        saves = Saves(Path(), parallel, asynchronous=True, saved=lambda *_: None, log=lambda _: None)
        group = saves._new_group()
    finally:
        _devices_of.cache_clear()
    size = dist.get_world_size()
    assert gather_objects(dist.get_rank(), group) == list(range(size))
    return {"run": run - before, "save": _open_sockets() - run}


def _open_sockets() -> int:
    number = 0
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            number += os.readlink(entry).startswith("socket:")
    return number
