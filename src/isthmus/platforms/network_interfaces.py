"""Network interfaces of this machine, and those that collectives are configured to use."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from isthmus.errors import UsageError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface with one of its addresses."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} {self.address}"


def interfaces() -> list[Interface]:
    """Interfaces with an address, IPv4 first; without link-local IPv6, which needs a scope to connect to."""
    result = []
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, addresses in psutil.net_if_addrs().items():
            result += [Interface(name, a.address) for a in addresses if a.family == family and "%" not in a.address]
    return result


def named_by(variable: str, environment: Mapping[str, str] = os.environ) -> Interface | None:
    """The first interface that ``variable`` names; None if it is not set.

    ``GLOO_SOCKET_IFNAME`` lists names, ``NCCL_SOCKET_IFNAME`` prefixes, names after ``=`` or exclusions after ``^``.
    A UsageError if this machine has no such interface with an address.
    """
    value = environment.get(variable, "")
    if not value:
        return None
    present = interfaces()
    chosen = [interface for interface in present if _matches(variable, value, interface.name)]
    if not chosen:
        raise UsageError(
            f"{variable}={value} names no network interface with an address on {socket.gethostname()}; it has "
            f"{', '.join(map(str, present)) or 'none'}. Name one of these, or unset {variable}."
        )
    return chosen[0]


def loopback() -> Interface | None:
    """The interface that only this machine reaches."""
    return next((interface for interface in interfaces() if interface.address == "127.0.0.1"), None)


def _matches(variable: str, value: str, name: str) -> bool:
    if variable != NCCL:
        return name in value.split(",")
    words = value.lstrip("^=").split(",")
    if value.startswith("^"):
        return not any(name.startswith(word) for word in words)
    return name in words if value.startswith("=") else any(name.startswith(word) for word in words)


def route_to(host: str) -> Interface | None:
    """The interface that routes to ``host``; None without a route."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            address_here = str(probe.getsockname()[0])
    except OSError:
        return None
    return next(
        (interface for interface in interfaces() if interface.address == address_here), Interface("?", address_here)
    )
