"""Metadata, constraints and pages name the same oldest Python and torch."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

EXTRAS = ("tensorboard", "sentencepiece", "data")
LINT = {"ruff", "mypy", "import-linter"}
"""Run on one Python only."""


@pytest.fixture(scope="module")
def oldest(pyproject: dict[str, Any]) -> tuple[str, str]:
    """The oldest Python and torch, such as ("3.10", "2.6")."""
    torch = next(item for item in required(pyproject) if item.name == "torch")
    return pyproject["project"]["requires-python"].removeprefix(">="), lower_bound(torch)


def required(pyproject: dict[str, Any]) -> list[Requirement]:
    """Dependencies with those of the extras that the tests use."""
    project = pyproject["project"]
    extras = [line for name in (*EXTRAS, "dev") for line in project["optional-dependencies"][name]]
    results = [Requirement(line) for line in [*project["dependencies"], *extras]]
    return [item for item in results if item.name not in (*LINT, "isthmus")]


def lower_bound(requirement: Requirement) -> str:
    (bound,) = [item.version for item in requirement.specifier if item.operator == ">="]
    return bound


def pins(path: Path) -> dict[str, Version]:
    lines = [line.split("==") for line in path.read_text().splitlines() if "==" in line]
    return {canonicalize_name(name): Version(version) for name, version in lines}


def test_tools_and_pages_name_the_oldest_python(
    repository: Path, pyproject: dict[str, Any], oldest: tuple[str, str]
) -> None:
    python, torch = oldest
    assert f"Programming Language :: Python :: {python}" in pyproject["project"]["classifiers"]
    assert pyproject["tool"]["ruff"]["target-version"] == f"py{python.replace('.', '')}"
    assert pyproject["tool"]["mypy"]["python_version"] == python
    assert f"sys.version_info < ({python.replace('.', ', ')})" in (repository / "Makefile").read_text()
    page = (repository / "docs/how-to/install.md").read_text()
    assert f"Python {python} or newer" in page and f"`torch>={torch}`" in page
    readme = (repository / "README.md").read_text()
    assert f"({torch} or newer)" in readme and f"Python {python}" in readme


def test_the_lower_bounds_are_a_tested_set(
    repository: Path, pyproject: dict[str, Any], oldest: tuple[str, str]
) -> None:
    tested = pins(repository / f"constraints/cpu-py{oldest[0].replace('.', '')}.txt")
    for requirement in required(pyproject):
        bound, pin = Version(lower_bound(requirement)).release, tested[canonicalize_name(requirement.name)]
        assert pin.release[: len(bound)] == bound, (requirement, pin)


def test_megatron_core_sets_the_oldest_torch(oldest: tuple[str, str]) -> None:
    theirs = [Requirement(line) for line in metadata.requires("megatron-core") or ()]
    (torch,) = [their for their in theirs if their.name == "torch" and their.marker is None]
    assert Version(lower_bound(torch)) == Version(oldest[1])


def test_constraints_are_in_the_ranges(repository: Path, pyproject: dict[str, Any]) -> None:
    files = sorted(repository.glob("constraints/cpu-*.txt"))
    assert len(files) == 2
    for path in files:
        tested = pins(path)
        for requirement in required(pyproject):
            assert tested[canonicalize_name(requirement.name)] in requirement.specifier, (path.name, requirement)


def test_recorded_resolutions_are_in_the_tested_range(repository: Path, pyproject: dict[str, Any]) -> None:
    """`isthmus doctor` reports a version below the oldest set as an error, so pip must not choose one."""
    tested = pins(repository / "constraints/cpu-py310.txt")
    record = max(repository.glob("benchmarks/results/*_package-resolutions_*.json"))
    resolutions = {name: lines for name, lines in json.loads(record.read_text())["resolutions"].items() if "--" in name}
    assert len(resolutions) == 8
    direct = {canonicalize_name(Requirement(line).name) for line in pyproject["project"]["dependencies"]}
    for name, lines in resolutions.items():
        versions = {line.split("==")[0]: Version(line.split("==")[1]) for line in lines if line}
        assert direct <= {*versions}
        assert {package: versions[package] for package in direct if versions[package] < tested[package]} == {}, name
