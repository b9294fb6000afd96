"""Network interfaces, RDMA devices, and the variables of NCCL, RCCL and gloo that name them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from isthmus.errors import UsageError
from isthmus.platforms.network_interfaces import GLOO, NCCL, interfaces, named_by
from isthmus.tools.doctor.findings import Finding, error, ok, warning
from isthmus.tools.doctor.machine import Machine

_NET, RDMA = "/sys/class/net", "/sys/class/infiniband"
_HCA, _GID = "NCCL_IB_HCA", "NCCL_IB_GID_INDEX"


def check_network(machine: Machine) -> Iterator[Finding]:
    shown = [
        f"{interface}{_speed(machine, interface.name)}"
        for interface in interfaces()
        if not _is_loopback(interface.name)
    ]
    if shown:
        yield ok("network", ", ".join(dict.fromkeys(shown)), "psutil, /sys/class/net")
    else:
        yield ok("network", "no interface but loopback: ranks of this machine only", "psutil")
    for variable in (GLOO, NCCL):
        try:
            chosen = named_by(variable, machine.environment)
        except UsageError as failure:
            text, _, hint = str(failure).rpartition(". ")
            yield error("network", text, hint, variable)
            continue
        if chosen is None:
            continue
        state = machine.read(f"{_NET}/{chosen.name}/operstate")
        if state == "down":
            yield error("network", f"{variable} names {chosen}, which is down", "Name another, or unset it.", variable)
        elif _is_loopback(chosen.name):
            yield warning(
                "network", f"{variable} names {chosen}: no other machine can be reached", f"Unset {variable}.", variable
            )
        else:
            yield ok("network", f"{variable} names {chosen}", variable)


def _is_loopback(name: str) -> bool:
    return name == "lo" or name.startswith("lo:")


def _speed(machine: Machine, name: str) -> str:
    speed = machine.read(f"{_NET}/{name}/speed") or ""
    return f" ({int(speed) / 1000:g} Gbit/s)" if speed.isdigit() and int(speed) > 0 else ""


def check_rdma(machine: Machine) -> Iterator[Finding]:
    """Without RDMA devices there is nothing to find, except variables that name some."""
    devices = machine.names(RDMA)
    for device in devices:
        yield from _device(machine, device)
    if devices and not any(name.startswith("uverbs") for name in machine.names("/dev/infiniband")):
        yield warning(
            "RDMA",
            "there are RDMA devices, but no /dev/infiniband/uverbs*, so NCCL and RCCL use TCP",
            "In a container, --device /dev/infiniband; otherwise load the module ib_uverbs.",
            "/dev/infiniband",
        )
    value = machine.environment.get(_HCA, "")
    if wrong := _absent(value, devices):
        yield warning(
            "RDMA",
            f"{_HCA}={value} names {', '.join(wrong)}, and this machine has {', '.join(devices) or 'no RDMA device'}; "
            "without any of those named, machines communicate over TCP",
            f"Name devices that exist (ibv_devices or rdma link lists them), or unset {_HCA}: NCCL and RCCL find them.",
            _HCA,
        )
    elif value and devices:
        yield ok("RDMA", f"{_HCA}={value} names devices of this machine", _HCA)
    yield from _gid(machine, devices)


def _device(machine: Machine, device: str) -> Iterator[Finding]:
    for port in machine.names(f"{RDMA}/{device}/ports"):
        folder = f"{RDMA}/{device}/ports/{port}"
        state, rate, layer = (machine.read(f"{folder}/{name}") or "?" for name in ("state", "rate", "link_layer"))
        text = f"{device} port {port}: {state.partition(':')[2].strip() or state}, {rate}, {layer}"
        if state.endswith("ACTIVE"):
            yield ok("RDMA", text, f"{folder}/state")
        else:
            yield warning(
                "RDMA",
                text,
                "Collectives between machines do not use it: check cable, switch and, for InfiniBand, the subnet "
                f"manager. If it is not meant for training, leave it out of {_HCA}.",
                f"{folder}/state",
            )


def _absent(value: str, devices: list[str]) -> list[str]:
    """The entries of NCCL_IB_HCA that match no device: prefixes, exact names after ``=``, exclusions after ``^``."""
    names = [entry.partition(":")[0] for entry in value.lstrip("^=").split(",") if entry]
    if value.startswith("^"):
        return []
    exact = value.startswith("=")
    return [
        name for name in names if not any(device == name if exact else device.startswith(name) for device in devices)
    ]


def _gid(machine: Machine, devices: list[str]) -> Iterator[Finding]:
    index = machine.environment.get(_GID, "")
    if not index.isdigit():
        return
    for device in devices:
        for port in machine.names(f"{RDMA}/{device}/ports"):
            folder = f"{RDMA}/{device}/ports/{port}"
            address = machine.read(f"{folder}/gids/{index}") or ""
            if machine.read(f"{folder}/link_layer") == "Ethernet" and not re.search("[1-9a-f]", address):
                yield error(
                    "RDMA",
                    f"{_GID}={index}, and {device} port {port} has no address with this number",
                    f"show_gids lists them: take a RoCE v2 one, or unset {_GID}.",
                    f"{folder}/gids/{index}",
                )
