"""The canary tells failures of a newest release from failures of the checkout, and installs what a release requires."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def canary(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("canary", repository / "benchmarks/canary.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(repository / "benchmarks"))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


def add_package(site: Path, name: str, version: str, *requires: str) -> None:
    folder = site / f"{name}-{version}.dist-info"
    folder.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *(f"Requires-Dist: {it}" for it in requires),
    ]
    (folder / "METADATA").write_text("\n".join(lines) + "\n")


def test_what_a_release_requires_besides_is_missing(canary: ModuleType, tmp_path: Path) -> None:
    torch = metadata.version("torch").partition("+")[0]
    requires = ("torch>=999", f"numpy<={metadata.version('numpy')}", "acme-tokens>=2", "acme-rare; extra == 'rare'")
    add_package(tmp_path, "peft", "99.0", *requires)
    assert canary.unmet(tmp_path) == ["acme-tokens>=2", "torch>=999"]
    add_package(tmp_path, "acme_tokens", "2.1", f"torch>={torch}")
    assert canary.unmet(tmp_path) == ["torch>=999"]


def test_unknown_packages_are_refused(canary: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        canary.parse(["megatron-core,acme"])
    assert "no tests are listed for acme" in capsys.readouterr().err


@pytest.mark.benchmarks
def test_a_failure_of_the_checkout_is_not_one_of_the_release(
    canary: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_case.py").write_text(
        "import importlib.metadata as m\n"
        "def test_newest_fails():\n    assert m.version('peft') != '99.0'\n"
        "def test_both_fail():\n    assert False\n"
        "def test_passes():\n    assert m.version('peft')\n"
    )
    monkeypatch.setattr(canary, "install", lambda site, packages: add_package(site, "peft", "99.0"))
    result = canary.run_case(("peft",), tmp_path / "case", [str(tmp_path / "test_case.py")], 1)
    assert result["packages"]["peft"]["newest"] == "99.0" and result["result"] == "failed"
    assert result["outcomes"] == {"passed": 1, "failed": 2}
    assert [test.rpartition("::")[2] for test in result["failed_only_with_newest"]] == ["test_newest_fails"]
    assert [test.rpartition("::")[2] for test in result["failed_with_tested_versions_too"]] == ["test_both_fail"]
