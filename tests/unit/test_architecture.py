"""The map of the house shows what is there: paths that exist, and every room on its floor."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "README.md", "docs/how-to/add-a-family.md", "docs/decisions/*.md")
TREES = ("src/", "tests/", "docs/", "benchmarks/", "constraints/")


def named_paths(page: str) -> set[str]:
    """Paths of this repository in backquotes."""
    words = re.findall(r"`([^`\s]+)`", page)
    return {word for word in words if word.startswith(TREES) or word in ("pyproject.toml", "Makefile", ".ci/run")}


def test_paths_that_pages_name_exist(repository: Path) -> None:
    pages = [page for pattern in PAGES for page in sorted(repository.glob(pattern))]
    named = {(page.name, path) for page in pages for path in named_paths(page.read_text())}
    assert len(named) > 20
    assert [entry for entry in sorted(named) if not (repository / entry[1]).exists()] == []


def test_floors_are_those_of_the_import_contract(repository: Path) -> None:
    rows = re.findall(r"^\| (\d+) \| `src/isthmus/(\w+)", (repository / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    contracts = tomllib.loads((repository / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    wanted = [
        (str(len(layers) - number), room)
        for number, layer in enumerate(layers)
        for room in layer.split(" | ")
    ]  # fmt: skip
    assert rows == wanted


def test_every_room_is_on_the_map(repository: Path) -> None:
    page = (repository / "ARCHITECTURE.md").read_text()
    rooms = [path.parent.name for path in (repository / "src/isthmus").glob("*/__init__.py")]
    assert [room for room in sorted(rooms) if f"`src/isthmus/{room}/`" not in page] == []


@pytest.mark.processes
def test_import_contracts_hold(repository: Path) -> None:
    command = Path(sys.executable).with_name("lint-imports")
    if not command.exists():
        pytest.skip("import-linter is not installed: pip install -e '.[dev]'")
    result = subprocess.run([command, "--no-cache"], cwd=repository, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout
