"""The wheel and the sdist: built twice with the same bytes, complete, typed, and used without the checkout."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import isthmus

pytestmark = [pytest.mark.thorough, pytest.mark.processes]


def without_checkout() -> dict[str, str]:
    removed = {"PYTHONPATH", "PYTHONDONTWRITEBYTECODE"}
    return {name: value for name, value in os.environ.items() if name not in removed} | {"HF_HUB_OFFLINE": "1"}


def built(repository: Path, folder: Path, umask: int) -> dict[str, Path]:
    """Wheel and sdist of the commit, from a clean clone, by suffix."""
    subprocess.run(["git", "clone", "--quiet", str(repository), str(folder / "clone")], check=True, umask=umask)
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(folder / "dist")]
    environment = without_checkout() | {"SOURCE_DATE_EPOCH": "1700000000"}
    done = subprocess.run(
        command, cwd=folder / "clone", env=environment, capture_output=True, text=True, timeout=300, umask=umask
    )
    assert done.returncode == 0, done.stderr
    return {path.suffix: path for path in sorted((folder / "dist").iterdir())}


def public_modules(pyproject: dict[str, Any]) -> str:
    """A regular expression of the modules whose docstrings ruff requires."""
    (pattern,) = pyproject["tool"]["ruff"]["lint"]["per-file-ignores"]
    pattern = pattern.removeprefix("!src/").removesuffix(".py").replace("/", ".").translate({123: "(?:", 125: ")"})
    return pattern.replace(".", r"\.").replace("*", r"\w+").replace(",", "|") + r"\b"


@pytest.fixture(scope="module")
def files(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    if not (repository / ".git").exists():
        pytest.skip("not a git checkout, so there is no clean clone")
    return built(repository, tmp_path_factory.mktemp("first"), 0o022)


@pytest.fixture(scope="module")
def site(files: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed wheel, without its dependencies."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*command, str(folder), str(files[".whl"])], check=True, env=without_checkout(), timeout=300)
    return folder


def test_two_builds_have_the_same_bytes(repository: Path, files: dict[str, Path], tmp_path: Path) -> None:
    second = built(repository, tmp_path, 0o077)
    assert files.keys() == second.keys() == {".whl", ".gz"}
    for suffix, path in files.items():
        digests = {hashlib.sha256(other.read_bytes()).hexdigest() for other in (path, second[suffix])}
        assert len(digests) == 1, path.name


def test_contents(files: dict[str, Path], pyproject: dict[str, Any], tmp_path: Path) -> None:
    with zipfile.ZipFile(files[".whl"]) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(next(name for name in names if name.endswith("dist-info/METADATA"))).decode()
    assert {"isthmus/py.typed", "isthmus/__init__.pyi", "isthmus/extras.py"} <= {*names}
    top = {name.split("/")[0] for name in names}
    assert top == {"isthmus", next(name for name in top if name.endswith(".dist-info"))}
    licenses = pyproject["project"]["license-files"]
    assert re.findall(r"^License-File: (.+)$", metadata, re.MULTILINE) == licenses
    assert all(any(name.endswith(f"dist-info/licenses/{path}") for name in names) for path in licenses)
    assert "License-Expression: Apache-2.0 AND MIT" in metadata
    extras = re.findall(r"^Provides-Extra: (.+)$", metadata, re.MULTILINE)
    assert sorted(extras) == sorted(pyproject["project"]["optional-dependencies"])
    with tarfile.open(files[".gz"]) as sdist:
        sources = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"pyproject.toml", "LICENSE", "tests/unit/test_package.py", "constraints/cpu-py310.txt"} <= sources


def test_the_wheel_is_used_without_the_checkout(repository: Path, site: Path, tmp_path: Path) -> None:
    def isthmus(*arguments: str) -> str:
        code = f"import sys; sys.path.insert(0, {str(site)!r}); from isthmus.cli.main import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path, env=without_checkout(), capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        assert str(repository) not in done.stdout + done.stderr
        return done.stdout

    assert isthmus("--version").split()[0] == "isthmus"
    findings = json.loads(isthmus("doctor", "--json"))
    assert "tested range" in json.dumps(findings), "the wheel has no constraints/"
    assert "isthmus sft" in isthmus("sft", "--help")


def test_types_are_known(repository: Path, pyproject: dict[str, Any], tmp_path: Path) -> None:
    """pyright knows the types of all public symbols, and of at least 95% of those of all modules."""
    pyright = repository / "build/pyright/bin/pyright"
    if not pyright.exists():
        pytest.skip("needs pyright in build/pyright: make types")
    # With --verifytypes it ignores --pythonpath: the first Python on the PATH has the package and its dependencies.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        [str(pyright), "--verifytypes", "isthmus", "--ignoreexternal", "--outputjson"],
        cwd=tmp_path, env=without_checkout() | {"PATH": path, "PYTHONPATH": str(repository / "src")},
        capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    report = json.loads(done.stdout)["typeCompleteness"]
    assert report["packageRootDirectory"] == str(repository / "src/isthmus"), done.stderr
    symbols = {symbol["name"]: symbol["isTypeKnown"] for symbol in report["symbols"] if symbol["isExported"]}
    unknown = sorted(name for name, is_known in symbols.items() if not is_known)
    exported = {f"{module}.{name}" for module, name in isthmus._LAZY.values()}
    public = [name for name in symbols if name in exported or re.match(public_modules(pyproject), name)]
    known = 1 - len(unknown) / len(symbols)
    print(f"known types: {known:.1%} of {len(symbols)} symbols, {len(public)} of them public")
    assert len(public) > 500 and [name for name in unknown if name in public] == []
    assert known >= 0.95, "\n".join(["annotate some of these:", *unknown])
