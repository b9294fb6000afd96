"""The files that build container images fit the package, its tested versions, and the page about them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import typer
from packaging.requirements import Requirement
from packaging.version import Version

import isthmus
from isthmus.cli.main import app

PLATFORMS = ("cpu", "cuda", "rocm")
PAGE = "docs/how-to/containers.md"
ROOT_ONLY = {"RUN", "COPY"}
"""Instructions that the build runs as root, before it changes the user."""


def instructions(path: Path) -> list[tuple[str, str]]:
    """(name, rest) of each instruction of a Dockerfile."""
    text = re.sub(r"^\s*#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    words = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [(name.upper(), rest.strip()) for name, _, rest in words]


def values(path: Path, name: str) -> list[str]:
    return [rest for word, rest in instructions(path) if word == name]


def arguments(path: Path) -> dict[str, str]:
    """Build arguments with their defaults."""
    return dict(rest.split("=", 1) for rest in values(path, "ARG"))


def section(definition: str, name: str) -> list[str]:
    """Lines of a section of an Apptainer definition file."""
    (text,) = re.findall(rf"^%{name}\n(.*?)(?=^%|^#|\Z)", definition, re.MULTILINE | re.DOTALL)
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.fixture(params=PLATFORMS)
def dockerfile(request: pytest.FixtureRequest, repository: Path) -> Path:
    return repository / f"docker/Dockerfile.{request.param}"


@pytest.fixture(scope="module")
def definition(repository: Path) -> str:
    return (repository / "docker/isthmus.def").read_text()


@pytest.fixture(scope="module")
def bases(repository: Path) -> dict[str, tuple[str, str]]:
    """Python and torch of each base image on the page."""
    page = (repository / PAGE).read_text()
    rows = re.findall(r"^\| `([^`]+:[^`]+)` \| [^|]+ \| ([\d.]+) \| ([\d.]+)", page, re.MULTILINE)
    return {image: (python, torch) for image, python, torch in rows}


def test_each_platform_has_a_dockerfile(repository: Path) -> None:
    assert {path.name for path in repository.glob("docker/Dockerfile*")} == {f"Dockerfile.{name}" for name in PLATFORMS}


def test_a_container_runs_as_a_user(dockerfile: Path) -> None:
    names = [name for name, _ in instructions(dockerfile)]
    (user,) = values(dockerfile, "USER")
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user), "Kubernetes checks runAsNonRoot with numbers only"
    assert ROOT_ONLY.isdisjoint(names[names.index("USER") :])


def test_the_health_check_is_a_command_of_isthmus(dockerfile: Path) -> None:
    (check,) = values(dockerfile, "HEALTHCHECK")
    words = json.loads(check.partition("CMD ")[2])
    assert words == ["isthmus", "doctor", "--quick"]
    verb = typer.main.get_command(app).commands[words[1]]  # type: ignore[attr-defined]
    assert words[2] in {option for item in verb.params for option in item.opts}


def test_extras_of_images_exist(dockerfile: Path, definition: str, pyproject: dict[str, Any]) -> None:
    known = pyproject["project"]["optional-dependencies"].keys()
    defaults = dict(line.split("=", 1) for line in section(definition, "arguments"))
    for extras in (arguments(dockerfile)["EXTRAS"], defaults["EXTRAS"]):
        assert set(extras.split(",")) <= known
    for extras in re.findall(r"EXTRAS=([\w,]+)", definition):
        assert set(extras.split(",")) <= known


def test_images_get_the_wheel_its_versions_and_the_script(dockerfile: Path, definition: str, repository: Path) -> None:
    sources = {word for rest in values(dockerfile, "COPY") for word in rest.split()[:-1]}
    first, *patterns = (repository / ".dockerignore").read_text().split()
    assert first == "*" and {f"!{source}" for source in sources} == set(patterns), "the build reads what it copies"
    files = dict(line.split() for line in section(definition, "files"))
    assert files.keys() == sources and set(files.values()) == {"/opt/isthmus/"}
    wheel = f"dist/isthmus-{isthmus.__version__}-py3-none-any.whl"
    for source in sources:
        assert any(repository.glob(source)) or fnmatch(wheel, source), source
    (script,) = [rest for rest in values(dockerfile, "RUN") if "install.sh" in rest]
    assert script in " ".join(section(definition, "post"))


def test_the_python_of_the_cpu_image_has_tested_versions(repository: Path, bases: dict[str, tuple[str, str]]) -> None:
    image = arguments(repository / "docker/Dockerfile.cpu")["BASE"]
    python = re.fullmatch(r"python:(3\.\d+)-slim-\w+", image)
    assert python is not None
    versions = (repository / f"constraints/cpu-py{python[1].replace('.', '')}.txt").read_text()
    (torch,) = re.findall(r"^torch==(\S+)$", versions, re.MULTILINE)
    assert bases[image] == (python[1], torch)


def test_the_page_has_the_base_images(dockerfile: Path, definition: str, bases: dict[str, tuple[str, str]]) -> None:
    assert arguments(dockerfile)["BASE"] in bases
    assert set(re.findall(r"\bBASE=(\S+)", definition)) <= bases.keys()


def test_base_images_have_a_python_and_a_torch_that_isthmus_supports(
    pyproject: dict[str, Any], bases: dict[str, tuple[str, str]]
) -> None:
    project = pyproject["project"]
    (torch,) = [item for item in map(Requirement, project["dependencies"]) if item.name == "torch"]
    pythons = Requirement(f"python{project['requires-python']}")
    assert len(bases) >= 5
    for image, versions in bases.items():
        assert versions[0] in pythons.specifier and Version(versions[1]) in torch.specifier, image
        tag = re.search(r"_py([\d.]+)_pytorch_release_([\d.]+)$", image)
        assert tag is None or (tag[1], tag[2]) == versions, image


def test_the_dev_container_has_a_tested_python_and_a_target_of_make(repository: Path) -> None:
    text = (repository / ".devcontainer/devcontainer.json").read_text()
    settings = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
    python = re.fullmatch(r"\S+/python:(3\.\d+)-\w+", settings["image"])
    assert python is not None and (repository / f"constraints/cpu-py{python[1].replace('.', '')}.lock").exists()
    make, target = settings["postCreateCommand"].split()
    assert make == "make" and re.search(rf"^{target}:", (repository / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.processes
@pytest.mark.parametrize("wheels", [(), ("0.1.0", "0.2.0")], ids=["none", "two"])
def test_one_wheel_is_expected(repository: Path, tmp_path: Path, wheels: tuple[str, ...]) -> None:
    shutil.copy(repository / "docker/install.sh", tmp_path)
    for version in wheels:
        (tmp_path / f"isthmus-{version}-py3-none-any.whl").touch()
    result = subprocess.run(["bash", tmp_path / "install.sh"], capture_output=True, text=True)
    assert result.returncode == 1
    assert "dist/ must have one wheel of isthmus" in result.stderr and "make dist" in result.stderr
