from __future__ import annotations

import pytest

from isthmus.errors import UsageError
from isthmus.platforms import network_interfaces
from isthmus.platforms.network_interfaces import GLOO, NCCL, Interface, named_by

PRESENT = [Interface(name, f"10.0.0.{number}") for number, name in enumerate(("lo", "docker0", "eth0", "eth1"))]


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [(GLOO, "eth1", "eth1"), (GLOO, "eth1,eth0", "eth0"), (NCCL, "eth", "eth0"), (NCCL, "=eth1", "eth1"),
     (NCCL, "^docker,lo", "eth0")],
)  # fmt: skip
def test_interface_that_a_variable_names(monkeypatch: pytest.MonkeyPatch, variable: str, value: str, name: str) -> None:
    monkeypatch.setattr(network_interfaces, "interfaces", lambda: PRESENT)
    chosen = named_by(variable, {variable: value})
    assert chosen is not None and chosen.name == name
    assert named_by(variable, {}) is None


@pytest.mark.parametrize(("variable", "value"), [(GLOO, "eth"), (NCCL, "=eth"), (NCCL, "ib")])
def test_missing_interface(monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    monkeypatch.setattr(network_interfaces, "interfaces", lambda: PRESENT)
    with pytest.raises(UsageError, match=f"{variable}={value} names no .*eth0 10.0.0.2"):
        named_by(variable, {variable: value})


def test_route_to_this_machine() -> None:
    way = network_interfaces.route_to("127.0.0.1")
    assert way is not None and way.address == "127.0.0.1" and way.name == "lo"
    assert network_interfaces.route_to("no-such-host.invalid") is None
