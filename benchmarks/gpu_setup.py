"""Compares the packages of a Python with the ranges of pyproject.toml, and installs from carried wheels what differs.

    python benchmarks/gpu_setup.py --wheels gpu-wheels --site build/gpu-site

For a GPU machine without network. The packages of the machine stay as they are: wheels are installed into a folder for
PYTHONPATH. Exit code 2 if a package is missing or has a wrong version that no wheel replaces. It needs pip alone.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from email.parser import HeaderParser
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

try:
    from packaging.markers import default_environment
    from packaging.requirements import Requirement
    from packaging.tags import Tag, sys_tags
    from packaging.utils import canonicalize_name, parse_wheel_filename
except ModuleNotFoundError:  # a bare machine
    from pip._vendor.packaging.markers import default_environment  # type: ignore[assignment]
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]
    from pip._vendor.packaging.tags import Tag, sys_tags  # type: ignore[assignment]
    from pip._vendor.packaging.utils import canonicalize_name, parse_wheel_filename  # type: ignore[assignment]

REPOSITORY = Path(__file__).resolve().parent.parent
MACHINE_ONLY = ("torch", "numpy")
"""Not carried: the machine has a build of torch for its GPU, with numpy. What they require is not checked."""
TEST_PACKAGES = ("pytest>=8", "safetensors>=0.8")
OPTIONAL = {
    "accelerate": "contestant trainer-compiled",
    "torchao": "contestant plain-fp8",
    "nvidia-ml-py": "clock, power and temperature",
    "bitsandbytes": "adam-8bit, qlora-8b",
    "trl": "contestants trl",
    "flash-attn": "FlashAttention in transformers, else torch's kernels",
}
"""Package -> what is left out without it."""
FREE_GB = 60
"""For the folders of models and exports."""


@dataclass(frozen=True, slots=True)
class Package:
    """A package of the machine, or a wheel."""

    name: str
    version: str
    requires: tuple[str, ...]
    wheel: Path | None = None


@dataclass(slots=True)
class Plan:
    """The packages that are used, and the requirements that none satisfies."""

    used: dict[str, Package] = field(default_factory=dict)
    unsatisfied: dict[str, str] = field(default_factory=dict)


def requirements() -> tuple[list[str], dict[str, str]]:
    """What the tests and benchmarks need; and what they can use, with its range of pyproject.toml."""
    project: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    extras = [Requirement(item) for items in project["optional-dependencies"].values() for item in items]
    ranges: dict[str, str] = {canonicalize_name(item.name): str(item) for item in extras if item.specifier}
    return [*project["dependencies"], *TEST_PACKAGES], {name: ranges.get(name, name) for name in OPTIONAL}


def installed(paths: list[str]) -> dict[str, Package]:
    """Packages of the machine by name; the first folder of the path wins."""
    result: dict[str, Package] = {}
    for item in distributions(path=paths):
        name = item.metadata["Name"] if item.metadata else None
        if name and item.version:
            package = Package(canonicalize_name(name), item.version, tuple(item.requires or ()))
            result.setdefault(package.name, package)
    return result


def carried(folder: Path, tags: Iterable[Tag]) -> list[Package]:
    """The wheels for this Python, the newest first."""
    supported, wheels = frozenset(tags), []
    for path in folder.glob("*.whl"):
        name, version, _, wheel_tags = parse_wheel_filename(path.name)
        if not wheel_tags.isdisjoint(supported):
            wheels.append((version, Package(name, str(version), _requires(path), path)))
    return [package for _, package in sorted(wheels, key=lambda pair: pair[0], reverse=True)]


def _requires(path: Path) -> tuple[str, ...]:
    with zipfile.ZipFile(path) as archive:
        (metadata,) = [name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name)]
        text = archive.read(metadata).decode("utf-8")
    return tuple(HeaderParser().parsestr(text).get_all("Requires-Dist") or ())


def plan(roots: Iterable[str], machine: Mapping[str, Package], wheels: list[Package], environment: Any) -> Plan:
    """Choose the machine's version of each package if it is in all ranges, or else the newest wheel that is."""
    result = Plan()
    for _ in range(50):  # a chosen version has requirements of its own
        ranges: dict[str, list[tuple[Requirement, str]]] = {}
        _gather([Requirement(root) for root in roots], "isthmus", result.used, ranges, environment, set())
        chosen = Plan()
        for name, needed in ranges.items():
            candidates = [machine[name]] if name in machine else []
            candidates += [] if name in MACHINE_ONLY else [wheel for wheel in wheels if wheel.name == name]
            fits = (
                item
                for item in candidates
                if all(need.specifier.contains(item.version, prereleases=True) for need, _ in needed)
            )
            if (first := next(fits, None)) is not None:
                chosen.used[name] = first
            else:
                chosen.unsatisfied[name] = _unsatisfied(name, needed, candidates)
        if chosen == result:
            return result
        result = chosen
    result.unsatisfied.setdefault("versions", "no combination of the machine's packages and the wheels fits")
    return result


def _gather(
    needs: Iterable[Requirement], by: str, used: Mapping[str, Package],
    ranges: dict[str, list[tuple[Requirement, str]]], environment: Any, seen: set[tuple[str, str]],
) -> None:  # fmt: skip
    for need in needs:
        name = canonicalize_name(need.name)
        ranges.setdefault(name, []).append((need, by))
        if name in MACHINE_ONLY or name not in used:
            continue
        for extra in ("", *need.extras):
            if (name, extra) not in seen:
                seen.add((name, extra))
                children = [Requirement(item) for item in used[name].requires]
                selected = [
                    item
                    for item in children
                    if (item.marker is None and not extra)
                    or (item.marker and item.marker.evaluate(environment | {"extra": extra}))
                ]
                _gather(selected, name, used, ranges, environment, seen)


def _unsatisfied(name: str, needed: list[tuple[Requirement, str]], candidates: list[Package]) -> str:
    ranges = ", ".join(dict.fromkeys(f"{need.specifier or 'any version'} (for {by})" for need, by in needed))
    places = [f"{'a wheel' if item.wheel else 'this Python'} has {item.version}" for item in candidates]
    return f"{name}: needs {ranges}; {', '.join(places) or 'neither this Python nor a wheel has it'}"


def notes(machine: Mapping[str, Package], site: Path) -> list[str]:
    """What a run can do without."""
    lines = []
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))), None)
    if compiler is None:
        lines.append("no C compiler: Triton builds no kernels, so that nothing is compiled")
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        lines.append("no Python.h: Triton builds no kernels, so that nothing is compiled. Install python3-dev")
    if not any(map(shutil.which, ("nvidia-smi", "rocm-smi", "amd-smi"))):
        lines.append("none of nvidia-smi, rocm-smi and amd-smi: is there a GPU?")
    build = next(folder for folder in (site, *site.parents) if folder.exists())
    if (free_gb := shutil.disk_usage(build).free / 1e9) < FREE_GB:
        lines.append(
            f"{free_gb:.0f} GB are free, models of 8B parameters need {FREE_GB}: name another disk with --work"
        )
    return lines


def install(packages: Iterable[Package], site: Path) -> None:
    """Install wheels into the folder, if they are not there already."""
    wheels = sorted(str(package.wheel) for package in packages if package.wheel)
    stamp, text = site / ".wheels", "".join(f"{wheel}\n" for wheel in [sys.version, *wheels])
    if stamp.exists() and stamp.read_text() == text:
        return
    shutil.rmtree(site, ignore_errors=True)
    site.mkdir(parents=True)
    if wheels:
        options = [
            "--quiet",
            "--disable-pip-version-check",
            "--root-user-action=ignore",
            "--no-index",
            "--no-deps",
            "--no-compile",
        ]
        subprocess.run([sys.executable, "-m", "pip", "install", *options, "--target", str(site), *wheels], check=True)
    stamp.write_text(text)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--wheels", type=Path, default=REPOSITORY / "gpu-wheels", help="default: gpu-wheels")
    parser.add_argument("--site", type=Path, required=True, help="folder to install into")
    parser.add_argument("--path", action="append", help="folder with the packages of the machine (default: sys.path)")
    chosen = parser.parse_args(arguments)
    needed, optional = requirements()
    machine = installed(chosen.path or [item for item in sys.path if item and Path(item) != chosen.site.resolve()])
    wheels, environment = carried(chosen.wheels, sys_tags()), dict(default_environment())
    result = plan(needed, machine, wheels, environment)
    carries = [
        f"{name} {item.version}" + (f" (this Python has {machine[name].version})" if name in machine else "")
        for name, item in sorted(result.used.items())
        if item.wheel
    ]
    if carries:
        print(f"from {chosen.wheels.name}: {', '.join(carries)}")
    if result.unsatisfied:
        for line in result.unsatisfied.values():
            print(f"gpu_setup.py: {line}", file=sys.stderr)
        version = ".".join(map(str, sys.version_info[:2]))
        print(
            f"gpu_setup.py: with network: {sys.executable} -m pip install, or make setup. Without: make gpu-wheels "
            f"GPU_PYTHONS={version} on a machine with network, and copy gpu-wheels here.",
            file=sys.stderr,
        )
        return 2
    for name, requirement in optional.items():
        with_it = plan([*needed, requirement], machine, wheels, environment)
        if with_it.unsatisfied:
            print(f"left out without {name}: {OPTIONAL[name]} ({next(iter(with_it.unsatisfied.values()))})")
        else:
            needed, result = [*needed, requirement], with_it
    for line in notes(machine, chosen.site.resolve()):
        print(f"note: {line}")
    install(result.used.values(), chosen.site)
    print(f"torch {machine['torch'].version}, Python {sys.version.split()[0]}: all ranges of pyproject.toml are met")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
