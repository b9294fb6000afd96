"""The rendezvous store of ranks that ``--nproc`` starts: a file in a private folder of the launcher.

torch's TCPStore has no password, and its server listens on all interfaces. No other user can open the file.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from typing import Any

import torch.distributed as dist

from isthmus.platforms import rank_env


def local_store() -> dist.FileStore | None:
    """The store of this run; None in a rank of another launcher, which has a TCPStore."""
    path = rank_env.store_file()
    return None if path is None else dist.FileStore(str(path))


def replace_env_rendezvous() -> None:
    """Let ``init_process_group`` of a script meet at the store of this run, or at none for a single rank.

    Ranks of another launcher meet at the address of ``MASTER_ADDR``, as torch does it.
    """
    handlers: dict[str, Any] = dist.rendezvous.__globals__[
        "_rendezvous_handlers"
    ]  # of its module, which the function of this name hides
    torch_rendezvous, calls = handlers["env"], count()

    def meet(url: str, timeout: timedelta, **options: Any) -> Iterator[tuple[dist.Store, int, int]]:
        store: dist.Store | None = local_store()
        if store is None and rank_env.world_size() == 1:
            store = dist.HashStore()
        if store is None:
            yield from torch_rendezvous(url, timeout=timeout, **options)
            return
        store.set_timeout(timeout)
        # The file has the keys of a process group that the script has destroyed.
        yield dist.PrefixStore(f"env_{next(calls)}", store), rank_env.rank(), rank_env.world_size()

    if torch_rendezvous.__module__ != __name__:
        handlers["env"] = meet
