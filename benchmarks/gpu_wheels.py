"""Collects wheels for a GPU machine without network, whose Python has torch already.

    make gpu-wheels GPU_PYTHON_VERSION=3.12 GPU_TORCH=2.10.0

The folder then contains Isthmus' dependencies, pytest and torchao, without torch and what only torch needs. pip
resolves them around an empty wheel that stands for the machine's torch, at the versions of constraints/cpu-py311.txt.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest requires tomli
    import tomli as tomllib

from certificate import REPOSITORY

EXTRAS = ("pytest>=8", "torchao", "safetensors>=0.8")
GLIBC_MINORS = range(5, 40)
"""pip takes a wheel only if its platform is named exactly: manylinux_2_5 to manylinux_2_39."""


def requirements() -> list[str]:
    """What the tests and benchmarks import, without torch."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    return [item for item in project["dependencies"] if not re.match(r"torch\b", item)] + list(EXTRAS)


def torch_stub(folder: Path, version: str) -> Path:
    """A wheel named torch without files and dependencies; the local version makes pip prefer it."""
    info = f"torch-{version}+there.dist-info"
    path = folder / f"torch-{version}+there-py3-none-any.whl"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: torch\nVersion: {version}+there\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in files.items():
            wheel.writestr(f"{info}/{name}", text)
    return path


def pip_arguments(chosen: argparse.Namespace, stubs: Path, out: Path) -> list[str]:
    """The arguments of ``pip download``; ``stubs`` has the torch stub and gets the constraints."""
    pins = (REPOSITORY / "constraints" / "cpu-py311.txt").read_text().splitlines()
    constraints = stubs / "constraints.txt"
    constraints.write_text("".join(f"{pin}\n" for pin in pins if not pin.startswith("torch==")))
    machine = chosen.machine
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in reversed(GLIBC_MINORS)]
    platforms += [f"{name}_{machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    arguments = ["download", "--quiet", "--dest", str(out), "--find-links", str(stubs), "--only-binary=:all:"]
    arguments += ["--constraint", str(constraints)]
    arguments += ["--python-version", chosen.python_version, "--implementation", "cp"]
    arguments += [f"--platform={platform}" for platform in platforms]
    return [*arguments, f"torch=={chosen.torch}+there", *requirements()]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python-version", required=True, help="of the GPU machine, such as 3.12")
    parser.add_argument("--torch", required=True, help="version of the torch there, such as 2.10.0")
    parser.add_argument("--machine", default="x86_64", help="of the GPU machine, uname -m (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "gpu-wheels", help="default: gpu-wheels")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    if old := sorted(chosen.out.glob("*.whl")):
        parser.error(
            f"{chosen.out} already has {len(old)} wheels. Two versions of one package do not install: remove it"
        )
    with tempfile.TemporaryDirectory() as folder:
        stubs, result = Path(folder) / "stubs", Path(folder) / "found"
        stubs.mkdir()
        stub = torch_stub(stubs, chosen.torch)
        subprocess.run([sys.executable, "-m", "pip", *pip_arguments(chosen, stubs, result)], check=True)
        (result / stub.name).unlink()
        for wheel in sorted(result.iterdir()):
            (chosen.out / wheel.name).write_bytes(wheel.read_bytes())
    wheels = sorted(chosen.out.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {size / 2**20:.0f} MiB, in {chosen.out}")
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:7.1f} MiB  {wheel.name}")


if __name__ == "__main__":
    main(sys.argv[1:])
