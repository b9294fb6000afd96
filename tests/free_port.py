"""Ports for servers that a test starts later, so that it cannot hand over a listening socket."""

from __future__ import annotations

import fcntl
import os
import socket

from shared_server import server_folder

_FIRST, _LAST = 10_000, 29_999
"""Below the ports that Linux takes for connections and for port 0, 32768 to 60999: one of those may be in use later."""


def free_port() -> int:
    """A port of 127.0.0.1 in no use, which no other test of this run gets."""
    descriptor = os.open(server_folder() / "port", os.O_RDWR | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        # The first one differs between test runs that share a machine.
        port = int(file.read() or _FIRST + os.getpid() * 101 % (_LAST - _FIRST))
        while True:
            port = port + 1 if port < _LAST else _FIRST
            with socket.socket() as tried:
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch's store does
                try:
                    tried.bind(("127.0.0.1", port))
                except OSError:
                    continue
            break
        file.seek(0)
        file.truncate()
        file.write(str(port))
    return port
