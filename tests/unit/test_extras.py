"""Optional packages have an extra, and every import of one of them names it in its error."""

from __future__ import annotations

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from isthmus import extras
from isthmus.errors import UsageError
from isthmus.extras import EXTRAS, check_installed, install_command, missing_packages, optional_package

USES = ("lora", "vision", "rl", "vllm", "trackers", "eval", "ray", "dev")
DISTRIBUTIONS = {
    "PIL": "pillow",
    "backports.zstd": "backports-zstd",
    "huggingface_hub": "huggingface-hub",
    "lm_eval": "lm-eval",
    "math_verify": "math-verify",
    "megatron": "megatron-core",
    "mlflow": "mlflow-skinny",
    "pynvml": "nvidia-ml-py",
    "ruamel": "ruamel-yaml",
}
"""Names in the package index that differ from those that Python imports."""
COMES_WITH = {
    "markupsafe": "jinja2",
    "pydantic_core": "pydantic",
    "safetensors": "transformers",
    "sympy": "torch",
    "typing_extensions": "torch",
}
"""Packages that a dependency requires in each of its versions."""
OTHER_PROCESSES = {
    "recipes/rollout/answer_worker.py": "math_verify",  # verified_math.py checks before it starts the process
    "recipes/rollout/vllm_plugin/isthmus_transfer.py": "vllm",  # vLLM imports it, without isthmus
    "recipes/rollout/vllm_plugin/isthmus_vllm.py": "vllm",
}
OTHERS = {"compression", "triton"}
"""Part of Python 3.14, and of builds of torch for GPUs; each use checks for it."""


def requirements(pyproject: dict[str, Any], extra: str) -> set[str]:
    """Distributions of an extra, with those of the extras that it names."""
    names = set[str]()
    for line in pyproject["project"]["optional-dependencies"][extra]:
        requirement = Requirement(line)
        if requirement.name == "isthmus":
            names |= {name for other in requirement.extras for name in requirements(pyproject, other)}
        else:
            names.add(canonicalize_name(requirement.name))
    return names


def imports(node: ast.AST, doors: tuple[str, ...] = ()) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Each import below ``node``, with the packages that the ``with`` statements around it name."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from ((alias.name, doors) for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module and not child.level:
            yield child.module, doors
        elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith("import_module") and child.args:
            if isinstance(child.args[0], ast.Constant):
                yield child.args[0].value, doors
        inner = doors
        if isinstance(child, ast.With):
            calls = [item.context_expr for item in child.items if isinstance(item.context_expr, ast.Call)]
            inner += tuple(call.args[1].value for call in calls if ast.unparse(call.func) == "optional_package")  # type: ignore[attr-defined]
        yield from imports(child, inner)


def optional_name(module: str) -> str | None:
    return next((name for name in EXTRAS if f"{module}.".startswith(f"{name}.")), None)


@pytest.fixture(scope="module")
def trees(repository: Path) -> dict[str, ast.Module]:
    source = repository / "src/isthmus"
    return {str(path.relative_to(source)): ast.parse(path.read_text()) for path in sorted(source.rglob("*.py"))}


@pytest.mark.slow
def test_each_import_is_of_a_dependency_or_names_an_extra(
    trees: dict[str, ast.Module], pyproject: dict[str, Any]
) -> None:
    required = {canonicalize_name(Requirement(line).name) for line in pyproject["project"]["dependencies"]}
    problems, optional = list[str](), set[str]()
    for path, tree in trees.items():
        for module, doors in imports(tree):
            package = module.partition(".")[0]
            if name := optional_name(module):
                optional.add(name)
                extra = {EXTRAS[door] for door in doors}
                if OTHER_PROCESSES.get(path) != name and EXTRAS[name] not in extra:
                    problems.append(f"{path} imports {module} outside of `with optional_package(..., {name!r})`")
            elif package not in {*sys.stdlib_module_names, *COMES_WITH, "isthmus", "backports", "isthmus_vllm"}:
                if canonicalize_name(DISTRIBUTIONS.get(package, package)) not in required | OTHERS:
                    problems.append(f"{path} imports {module}, which is neither a dependency nor in EXTRAS")
    assert problems == []
    assert {"bitsandbytes", "ray", "pyarrow", "lm_eval", "wandb", "backports.zstd"} <= optional


def test_each_package_is_in_its_extra(pyproject: dict[str, Any]) -> None:
    for package, extra in EXTRAS.items():
        distribution = canonicalize_name(DISTRIBUTIONS.get(package, package))
        assert distribution in requirements(pyproject, extra), (package, extra)
    declared = pyproject["project"]["optional-dependencies"]
    assert {*USES} <= {*declared} and all(requirements(pyproject, extra) for extra in declared)
    trackers = {EXTRAS[package] for package in extras.TRACKERS}
    assert requirements(pyproject, "trackers") == {
        name for extra in trackers for name in requirements(pyproject, extra)
    }


@pytest.mark.parametrize("package", COMES_WITH)
def test_a_dependency_requires_what_comes_with_it(package: str) -> None:
    lines = [Requirement(line) for line in metadata.requires(COMES_WITH[package]) or ()]
    names = {canonicalize_name(line.name) for line in lines if not line.marker or line.marker.evaluate({"extra": ""})}
    assert canonicalize_name(package) in names


@pytest.mark.parametrize("package", sorted(EXTRAS))
def test_an_import_error_names_the_extra(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    expected = re.escape(f"Run pip install 'isthmus[{EXTRAS[package]}]', or omit it")
    with pytest.raises(UsageError, match=rf"^logging.to=x needs {re.escape(package)} \(.+\)\. {expected}"):
        with optional_package("logging.to=x", package, otherwise="omit it"):
            importlib.import_module(package)


def test_a_tracker_names_the_extra_of_all() -> None:
    for package in extras.TRACKERS:
        assert "isthmus[trackers] installs all" in str(extras.missing_package("logging.to", package))
    assert "trackers" not in str(extras.missing_package("isthmus launch ray", "ray"))


def test_a_package_is_checked_without_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "find_spec", lambda package: None)
    with pytest.raises(UsageError, match=r"isthmus eval needs lm_eval \(not installed\). Run pip install 'isthmus\[ev"):
        check_installed("isthmus eval", "lm_eval")
    message = "This modeling file requires the following packages: PIL, timm. Run `pip install PIL timm`"
    assert missing_packages(message) == ["PIL", "timm"]
    assert install_command("PIL", "timm", "ray") == "pip install 'isthmus[vision,ray]'"
    monkeypatch.setattr(extras, "find_spec", lambda package: object())
    check_installed("isthmus eval", "lm_eval")
    assert missing_packages(message) == []
