"""The rendezvous of torch elastic on one machine, where its only agent has nobody to wait for.

The rendezvous of torch elastic itself opens a TCPStore on all interfaces and unpickles what it reads from there.
"""

from __future__ import annotations

import socket

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

BACKEND = "isthmus-local"


class LocalRendezvous(RendezvousHandler):
    """A rendezvous of one agent, with a store in the memory of its process."""

    def __init__(self, parameters: RendezvousParameters) -> None:
        self._run_id = parameters.run_id

    def get_backend(self) -> str:
        return BACKEND

    @property
    def use_agent_store(self) -> bool:
        return False

    def next_rendezvous(self) -> RendezvousInfo:
        """The rendezvous with an address for programs that need MASTER_ADDR and MASTER_PORT; nothing listens there."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = int(free.getsockname()[1])
        return RendezvousInfo(dist.HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        return None

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def register() -> str:
    """Make the rendezvous known to torch elastic; returns the name of its backend."""
    rendezvous_handler_registry.register(BACKEND, LocalRendezvous)
    return BACKEND
