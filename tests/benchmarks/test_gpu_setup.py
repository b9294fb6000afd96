"""The packages of a GPU machine: versions are compared with the ranges, and wheels replace what differs."""

from __future__ import annotations

import argparse
import importlib
import re
import subprocess
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(autouse=True)
def _benchmarks(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(repository / "benchmarks"))


def test_make_gpu_sets_up_first(repository: Path) -> None:
    done = subprocess.run(["make", "-n", "gpu-quick", "FRESH=1"], cwd=repository, capture_output=True, text=True)
    text = done.stdout.replace("\\\n", " ")
    assert text.index("gpu_setup.py") < text.index("gpu_parts.py --quick") < text.index("--fresh"), done


def _described(folder: Path, packages: dict[str, str]) -> Path:
    """A folder with the metadata of packages, as a machine has them."""
    for name, version in packages.items():
        info = folder / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        requires = "Requires-Dist: nvidia-cublas==13.1\n" if name == "torch" else ""
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{requires}")
    return folder


def _wheel(folder: Path, name: str, version: str, *requires: str, tag: str = "py3-none-any") -> None:
    folder.mkdir(exist_ok=True)
    info, lines = f"{name}-{version}.dist-info", "".join(f"Requires-Dist: {item}\n" for item in requires)
    with zipfile.ZipFile(folder / f"{name}-{version}-{tag}.whl", "w") as wheel:
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{lines}")
        wheel.writestr(f"{info}/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{info}/RECORD", "")
        wheel.writestr(f"{name}.py", f"__version__ = {version!r}\n")


MET = {"torch": "2.11.0+cu130", "numpy": "2.3.5", "transformers": "5.17.0", "triton": "3.6.0", "psutil": "7.1.0"}
"""Packages of a machine whose transformers is too old; others are missing."""


def test_versions_of_a_bare_machine_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All at once, in a moment, before anything is installed."""
    setup: Any = importlib.import_module("gpu_setup")
    machine, site = _described(tmp_path / "machine", MET), tmp_path / "site"
    arguments = ["--site", str(site), "--path", str(machine), "--wheels", str(tmp_path / "wheels")]
    started_s = time.monotonic()
    assert setup.main(arguments) == 2 and time.monotonic() - started_s < 20
    text = capsys.readouterr().err
    assert "transformers: needs >=5.20 (for isthmus); this Python has 5.17.0" in text
    for name in ("megatron-core", "pydantic", "ruamel-yaml", "tokenizers"):
        assert re.search(f"gpu_setup.py: {name}: needs .*; neither this Python nor a wheel has it", text), text
    assert "torch" not in re.findall(r"gpu_setup.py: (\S+):", text) and "psutil:" not in text
    assert "make gpu-wheels" in text and not site.exists()


def test_a_bare_machine_is_set_up_from_wheels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], pyproject: Any
) -> None:
    """Of a wrong version, and only what is needed; a wheel for another Python, or out of range, is not taken."""
    setup: Any = importlib.import_module("gpu_setup")
    machine, site, wheels = _described(tmp_path / "machine", MET), tmp_path / "site", tmp_path / "wheels"
    names = [re.match(r"[\w.-]+", item)[0] for item in [*pyproject["project"]["dependencies"], *setup.TEST_PACKAGES]]
    for name in set(names) - set(MET):
        _wheel(wheels, name.replace("-", "_").replace(".", "_"), "9999.0" if name != "megatron-core" else "0.17.1")
    _wheel(wheels, "transformers", "5.23.0", "tokenizers>=0.23", "tqdm")
    _wheel(wheels, "tqdm", "4.0")
    _wheel(wheels, "megatron_core", "0.20.0")
    _wheel(wheels, "psutil", "8.0")
    _wheel(wheels, "transformers", "5.24.0", tag="cp27-cp27m-win32")
    arguments = ["--site", str(site), "--path", str(machine), "--wheels", str(wheels)]
    assert setup.main(arguments) == 0
    text = capsys.readouterr().out
    assert "transformers 5.23.0 (this Python has 5.17.0)" in text and "left out without trl: contestants trl" in text
    files = {path.stem: path.read_text().strip() for path in site.glob("*.py")}
    assert files["transformers"] == "__version__ = '5.23.0'" and files["megatron_core"] == "__version__ = '0.17.1'"
    assert "tqdm" in files and not {"psutil", "torch", "numpy"} & files.keys()
    stamp = (site / ".wheels").stat().st_mtime_ns
    assert setup.main(arguments) == 0 and (site / ".wheels").stat().st_mtime_ns == stamp


def test_wheels_are_resolved_around_what_the_machine_has(tmp_path: Path, pyproject: dict[str, Any]) -> None:
    wheels: Any = importlib.import_module("gpu_wheels")
    with zipfile.ZipFile(wheels.stub(tmp_path, "torch", "2.10.0")) as archive:
        metadata = archive.read("torch-2.10.0+there.dist-info/METADATA").decode()
    assert "Version: 2.10.0+there" in metadata and "Requires-Dist" not in metadata
    chosen = argparse.Namespace(torch="2.10.0", numpy="2.4.6", machine="aarch64", extra=["trl"])
    arguments = wheels.pip_arguments(chosen, "3.12", tmp_path, tmp_path / "found")
    assert {"torch==2.10.0+there", "numpy==2.4.6+there", "trl", "3.12"} <= set(arguments)
    assert "--platform=manylinux_2_28_aarch64" in arguments
    expected = [item for item in pyproject["project"]["dependencies"] if not item.startswith(("torch", "numpy"))]
    assert set(expected) <= set(arguments) and not any(item.startswith(("torch>", "numpy>")) for item in arguments)
    constraints = (tmp_path / "constraints.txt").read_text()
    assert "torch==" not in constraints and "numpy==" not in constraints and "transformers==" in constraints
