"""Collects wheels for a GPU machine without network, whose Python has torch already.

    make gpu-wheels                                            # for Python 3.11 and 3.12
    make gpu-wheels GPU_PYTHONS=3.13 GPU_TORCH=2.12.0          # for others
    make gpu-wheels GPU_WITH="trl bitsandbytes"                # with these, and what they need: 200 MB more

The folder then contains Isthmus' dependencies, pytest, accelerate, torchao and nvidia-ml-py, without torch and numpy,
which a machine with torch has. pip resolves them around empty wheels that stand for those two, at the versions of
constraints/cpu-py311.txt. gpu_setup.py chooses the wheels of a machine's Python.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from certificate import REPOSITORY
from gpu_setup import TEST_PACKAGES
from gpu_setup import requirements as all_requirements

STUBS = ("torch", "numpy")
EXTRAS = (*TEST_PACKAGES, "accelerate>=1.5", "torchao", "nvidia-ml-py>=12")
GLIBC_MINORS = range(5, 40)
"""pip takes a wheel only if its platform is named exactly: manylinux_2_5 to manylinux_2_39."""


def requirements() -> list[str]:
    """What the tests and benchmarks import, without what the machine has."""
    needed, _ = all_requirements()
    return [item for item in (*needed, *EXTRAS) if not re.match(rf"({'|'.join(STUBS)})\b", item)]


def stub(folder: Path, name: str, version: str) -> Path:
    """A wheel without files and dependencies; the local version makes pip prefer it."""
    info = f"{name}-{version}+there.dist-info"
    path = folder / f"{name}-{version}+there-py3-none-any.whl"
    files = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}+there\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    with zipfile.ZipFile(path, "w") as wheel:
        for file, text in files.items():
            wheel.writestr(f"{info}/{file}", text)
    return path


def pip_arguments(chosen: argparse.Namespace, python: str, stubs: Path, out: Path) -> list[str]:
    """The arguments of ``pip download``; ``stubs`` has the stubs and gets the constraints."""
    pins = (REPOSITORY / "constraints" / "cpu-py311.txt").read_text().splitlines()
    constraints = stubs / "constraints.txt"
    constraints.write_text("".join(f"{pin}\n" for pin in pins if pin.partition("==")[0] not in STUBS))
    machine = chosen.machine
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in reversed(GLIBC_MINORS)]
    platforms += [f"{name}_{machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1", "linux")]
    arguments = ["download", "--quiet", "--dest", str(out), "--find-links", str(stubs), "--only-binary=:all:"]
    arguments += ["--constraint", str(constraints), "--python-version", python, "--implementation", "cp"]
    arguments += [f"--platform={platform}" for platform in platforms]
    versions = [f"torch=={chosen.torch}+there", f"numpy=={chosen.numpy}+there"]
    return [*arguments, *versions, *requirements(), *chosen.extra]


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python-version", nargs="+", default=["3.11", "3.12"], help="default: 3.11 3.12")
    parser.add_argument("--torch", default="2.11.0", help="version of the torch there (default: %(default)s)")
    parser.add_argument("--numpy", default="2.4.6", help="version of the numpy there (default: %(default)s)")
    parser.add_argument("--machine", default="x86_64", help="of the GPU machine, uname -m (default: %(default)s)")
    parser.add_argument("--with", dest="extra", nargs="+", default=[], help="further packages, such as trl")
    parser.add_argument("--out", type=Path, default=REPOSITORY / "gpu-wheels", help="default: gpu-wheels")
    chosen = parser.parse_args(arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    if old := sorted(chosen.out.glob("*.whl")):
        parser.error(f"{chosen.out} already has {len(old)} wheels, perhaps of other versions: remove it")
    with tempfile.TemporaryDirectory() as folder:
        stubs, result = Path(folder) / "stubs", Path(folder) / "found"
        stubs.mkdir()
        empty = [stub(stubs, name, getattr(chosen, name)).name for name in STUBS]
        for python in chosen.python_version:
            subprocess.run([sys.executable, "-m", "pip", *pip_arguments(chosen, python, stubs, result)], check=True)
        for wheel in sorted(result.iterdir()):
            if wheel.name not in empty:
                (chosen.out / wheel.name).write_bytes(wheel.read_bytes())
    wheels = sorted(chosen.out.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / 2**20:7.1f} MiB  {wheel.name}")
    print(
        f"{len(wheels)} wheels for Python {', '.join(chosen.python_version)}, {size / 2**20:.0f} MiB, in {chosen.out}"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
