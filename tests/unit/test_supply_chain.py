"""Locks have the tested versions with hashes; workflows name the commit of each action and pass actionlint."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

SETS = ("cpu-py310", "cpu-py311", "tools", "types", "workflows")


@pytest.mark.parametrize("name", SETS)
def test_a_lock_has_the_versions_of_its_set_and_only_hashed_files(repository: Path, name: str) -> None:
    versions = (repository / f"constraints/{name}.txt").read_text().splitlines()
    lock = (repository / f"constraints/{name}.lock").read_text().splitlines()
    locked = [re.fullmatch(r"(\S+)(?: --hash=sha256:[0-9a-f]{64})+", line) for line in lock]
    assert all(locked), "each line is a version with its hashes; write it with `make lock`"
    expected = [line.split("==") for line in versions if not line.startswith("#")]
    results = {line[1] for line in locked if line}
    assert results == {f"{canonicalize_name(package)}=={version}" for package, version in expected}


@pytest.mark.parametrize("name", SETS[:2])
def test_a_lock_is_complete(repository: Path, pyproject: dict[str, Any], name: str) -> None:
    """Installed without the dependencies of its packages: those of this project must be in it."""
    lock = (repository / f"constraints/{name}.lock").read_text().splitlines()
    locked = {canonicalize_name(line.split("==")[0]) for line in lock}
    project, python = pyproject["project"], {"python_version": f"3.{name[-2:]}", "extra": ""}
    extras = ("dev", "tensorboard", "wandb", "mlflow", "sentencepiece", "data")
    lines = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    needed = [Requirement(line) for line in [*lines, *pyproject["build-system"]["requires"]]]
    missing = [extra for extra in needed if not extra.marker or extra.marker.evaluate(python)]
    assert [str(extra) for extra in missing if canonicalize_name(extra.name) not in locked | {"isthmus"}] == []


def test_actions_are_named_by_commit(repository: Path) -> None:
    workflows = sorted((repository / ".github/workflows").glob("*.yml"))
    used = [line for path in workflows for line in re.findall(r"uses: (.+)", path.read_text())]
    assert len(workflows) == 5 and len(used) > 5
    assert [line for line in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}  # v[\d.]+", line)] == []


@pytest.mark.processes
def test_workflows_pass_actionlint(repository: Path) -> None:
    """With its shell checks, from the locked environment."""
    tools = repository / "build/actionlint/bin"
    if not (tools / "actionlint").exists():
        pytest.skip("needs actionlint in build/actionlint: make workflows")
    environment = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["actionlint", "-no-color"], cwd=repository, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_code_owners_are_paths_of_the_repository_without_invented_names(repository: Path) -> None:
    lines = (repository / ".github/CODEOWNERS").read_text().splitlines()
    owned = [line.split() for line in lines if re.match(r"(# )?[*/]", line)]
    paths = [words[words[0] == "#"] for words in owned]
    assert (
        len(paths) > 10
        and [path for path in paths if path != "*" and not (repository / path.strip("/")).exists()] == []
    )
    assert [words for words in owned if words[-1] != "TEAM" and not re.fullmatch(r"@[\w-]+/[\w-]+", words[-1])] == []
