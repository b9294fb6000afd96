"""The network interfaces of this machine, and which of them the collectives are told to use."""

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
    """One address of this machine."""

    name: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} {self.address}"


def interfaces() -> list[Interface]:
    """All that have an address, IPv4 before IPv6; link-local IPv6 left out, which nobody can connect to by itself."""
    found = []
    for family in (socket.AF_INET, socket.AF_INET6):
        for name, addresses in psutil.net_if_addrs().items():
            found += [Interface(name, a.address) for a in addresses if a.family == family and "%" not in a.address]
    return found


def named_by(variable: str, environment: Mapping[str, str] = os.environ) -> Interface | None:
    """The interface that ``variable`` names; None if it is not set.

    ``GLOO_SOCKET_IFNAME`` holds names, ``NCCL_SOCKET_IFNAME`` beginnings of names, ``=`` before a whole name and ``^``
    before those that are not to be used. Of several the first counts.

    Raises:
        UsageError: there is no such interface here, or it has no address.
    """
    value = environment.get(variable, "")
    if not value:
        return None
    present = interfaces()
    chosen = [one for one in present if _matches(variable, value, one.name)]
    if not chosen:
        raise UsageError(
            f"{variable}={value} names no network interface with an address on {socket.gethostname()}, which has "
            f"{', '.join(map(str, present)) or 'none'}. Name one of these, or unset {variable}."
        )
    return chosen[0]


def _matches(variable: str, value: str, name: str) -> bool:
    if variable != NCCL:
        return name in value.split(",")
    words = value.lstrip("^=").split(",")
    if value.startswith("^"):
        return not any(name.startswith(word) for word in words)
    return name in words if value.startswith("=") else any(name.startswith(word) for word in words)


def towards(host: str) -> Interface | None:
    """The interface and address from which this machine sends to ``host``; None if it knows no way there."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    return next((one for one in interfaces() if one.address == own), Interface("?", own))
