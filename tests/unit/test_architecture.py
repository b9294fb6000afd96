"""Paths named in the documentation exist, and ARCHITECTURE.md lists each package with its level."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

from isthmus.recipes.registry import RECIPES

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


Nodes = Mapping[str, Sequence[ast.AST]]
"""Imports, classes and comparisons by module, function bodies included."""


@pytest.fixture(scope="module")
def modules(repository: Path) -> Nodes:
    source = repository / "src"
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.Compare)
    return {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"): [
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)
        ]
        for path in sorted(source.rglob("*.py"))
    }


def imported_modules(nodes: Sequence[ast.AST], modules: Nodes) -> set[str]:
    """Modules of the package that a module imports anywhere."""
    results = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            results |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            submodules = {f"{node.module}.{alias.name}" for alias in node.names} & modules.keys()
            results |= submodules or {node.module}
    return results & modules.keys()


@pytest.mark.slow
def test_no_import_circle(modules: Nodes) -> None:
    graph = {name: imported_modules(nodes, modules) - {name} for name, nodes in modules.items()}
    order = TopologicalSorter(graph)
    order.prepare()  # raises CycleError, which names the circle
    assert len(graph) > 100 and any(graph.values())


def compared_names(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Recipe names that are compared with something called ``recipe``."""
    for node in nodes:
        if not isinstance(node, ast.Compare):
            continue
        sides = [node.left, *node.comparators]
        words = [getattr(side, "attr", getattr(side, "id", "")) for side in sides]
        constants = {child.value for side in sides for child in ast.walk(side) if isinstance(child, ast.Constant)}
        if "recipe" in words and constants & {*RECIPES}:
            yield ast.unparse(node)


def test_nothing_asks_for_the_name_of_a_recipe(modules: Nodes) -> None:
    """Translations of other programs' options choose a recipe, which is theirs to name."""
    asked = {name: list(compared_names(nodes)) for name, nodes in modules.items() if ".dialects." not in name}
    assert {path: names for path, names in asked.items() if names} == {}
    assert list(compared_names(ast.walk(ast.parse("x = config.recipe in ('sft', 'dpo')"))))


@pytest.mark.processes
def test_import_contracts_hold(repository: Path) -> None:
    command = Path(sys.executable).with_name("lint-imports")
    if not command.exists():
        pytest.skip("import-linter is not installed: pip install -e '.[dev]'")
    result = subprocess.run([command, "--no-cache"], cwd=repository, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout


def test_names_of_classes_are_unique(modules: Nodes) -> None:
    classes = Counter(node.name for nodes in modules.values() for node in nodes if isinstance(node, ast.ClassDef))
    assert [name for name, count in classes.items() if count > 1] == []
