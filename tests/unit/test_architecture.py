"""Paths named in the documentation exist, and ARCHITECTURE.md lists each package with its level."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

PAGES = (
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "README.md",
    "docs/**/*.md",
    "benchmarks/README.md",
    "benchmarks/results/*.md",
)
TREES = ("src/", "tests/", "docs/", "benchmarks/", "constraints/", "examples/")


def named_paths(page: str) -> set[str]:
    """Paths of this repository in backquotes."""
    words = re.findall(r"`([^`\s]+)`", page)
    return {word for word in words if word.startswith(TREES) or word in ("pyproject.toml", "Makefile", ".ci/run")}


def test_paths_that_pages_name_exist(repository: Path) -> None:
    pages = [page for pattern in PAGES for page in sorted(repository.glob(pattern))]
    mentions = {(page.name, path) for page in pages for path in named_paths(page.read_text())}
    assert len(mentions) > 20
    assert [entry for entry in sorted(mentions) if not (repository / entry[1]).exists()] == []


def test_levels_match_the_import_contract(repository: Path, pyproject: dict[str, Any]) -> None:
    rows = re.findall(r"^\| (\d+) \| `src/isthmus/(\w+)", (repository / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    contracts = pyproject["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    expected = [
        (str(len(layers) - number), package)
        for number, layer in enumerate(layers)
        for package in layer.split(" | ")
    ]  # fmt: skip
    assert rows == expected


def test_each_package_is_listed(repository: Path) -> None:
    page = (repository / "ARCHITECTURE.md").read_text()
    packages = [path.parent.name for path in (repository / "src/isthmus").glob("*/__init__.py")]
    assert [package for package in sorted(packages) if f"`src/isthmus/{package}/`" not in page] == []


def imported_modules(path: Path, modules: dict[str, Path]) -> set[str]:
    """Modules of the package that a file imports anywhere, function bodies included."""
    results = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            results |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys()
            results |= submodules or {node.module}
    return results & modules.keys()


def test_no_import_circle(repository: Path) -> None:
    source = repository / "src"
    modules = {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): path
        for path in source.rglob("*.py")
    }
    graph = {name: imported_modules(path, modules) - {name} for name, path in modules.items()}
    order = TopologicalSorter(graph)
    order.prepare()  # raises CycleError, which names the circle
    assert len(graph) > 100 and any(graph.values())


@pytest.mark.processes
def test_import_contracts_hold(repository: Path) -> None:
    command = Path(sys.executable).with_name("lint-imports")
    if not command.exists():
        pytest.skip("import-linter is not installed: pip install -e '.[dev]'")
    result = subprocess.run([command, "--no-cache"], cwd=repository, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout


def test_names_of_classes_are_unique(repository: Path) -> None:
    classes = Counter(
        node.name
        for path in sorted((repository / "src").rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in classes.items() if count > 1] == []
