"""Installed packages against the versions that the tests ran with: the oldest and the newest set in ``constraints/``.

A wheel contains both sets beside this module; a checkout has them at its root.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from isthmus.tools.doctor.findings import Finding, error, ok, warning
from isthmus.tools.doctor.machine import Machine

_HERE = Path(__file__).resolve().parent
_SETS = ("cpu-py310.txt", "cpu-py311.txt")
"""Sets with the lower bounds of all dependencies, and with the newest versions."""
_PYTHON = ("3.10", "3.13")
_NEWER = {"megatron-core": "0.19.2"}
"""Tested versions that are not in the newest set: megatron-core 0.17 and newer require Python 3.12."""


def check_versions(machine: Machine) -> Iterator[Finding]:
    oldest, newest = (_tested(name) for name in _SETS)
    yield from compare_versions(
        {"Python": platform.python_version(), **installed_versions()},
        {"Python": _PYTHON[0], **oldest},
        {"Python": _PYTHON[1], **newest, **_NEWER},
    )


def _tested(name: str) -> dict[str, str]:
    folder = next((parent for parent in (_HERE, _HERE.parents[3]) if (parent / "constraints").is_dir()), _HERE)
    lines = (folder / "constraints" / name).read_text(encoding="utf-8").splitlines()
    pairs = (line.partition("==") for line in lines if "==" in line)
    return {_normal(package): version.split()[0] for package, _, version in pairs}


def installed_versions() -> dict[str, str]:
    """Version of each direct dependency, empty if it is missing."""
    versions = {}
    for requirement in metadata.requires("isthmus") or []:
        if "extra ==" in requirement:
            continue
        name = _normal(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = ""
    return versions


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def compare_versions(installed: dict[str, str], oldest: dict[str, str], newest: dict[str, str]) -> Iterator[Finding]:
    """Patch releases count as tested."""
    source, tested = "importlib.metadata, constraints/", []
    for name, version in installed.items():
        low, high = oldest.get(name, ""), newest.get(name, "")
        if not version or _numbers(version) < _numbers(low):
            yield error(
                "versions",
                f"{name} {version or 'is not installed'}; {low} is the oldest that works",
                "Install isthmus again (pip install), which updates its dependencies.",
                source,
            )
        elif high and _numbers(version)[:2] > _numbers(high)[:2]:
            yield warning(
                "versions",
                f"{name} {version} is newer than {high}, the newest that was tested",
                "It may work. If it does not, install the versions in constraints/cpu-py311.txt of the repository.",
                source,
            )
        else:
            tested.append(f"{name} {version}")
    if tested:
        yield ok("versions", f"within the tested range: {', '.join(tested)}", source)


def _numbers(version: str) -> tuple[int, ...]:
    """``2.13.0+rocm6.4`` -> (2, 13, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()
