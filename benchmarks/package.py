"""Builds the package twice from clean clones, and runs its verbs in environments that have the wheel and no checkout.

python benchmarks/package.py --python ENV/bin/python --record

ENV has the wheel and its dependencies: pip install dist/isthmus-*.whl. The script replaces the wheel in it by the one
that it has built.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from certificate import REPOSITORY, certificate, publish_result

SETTINGS = ("data.seq_length=256", "train.steps=2", "train.global_batch_size=2", "train.precision=fp32")
VERBS = (
    ("version", ("--version",)),
    ("doctor", ("doctor", "--json")),
    ("demo", ("demo", "--out", "demo", "--nproc", "1", "--json")),
    ("sft", ("sft", "--model", "demo/pretrain/hf", "--data", "demo/chats.jsonl", "--out", "run", *SETTINGS)),
    ("convert", ("convert", "run", "checkpoint", "--to", "torch_dist")),
    ("chat", ("chat", "run", "--max-new-tokens", "4")),
    ("report", ("report", "run", "--out", "report.html")),
)
"""Each uses the output of the ones before."""
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
IMPORTS = {"import isthmus": ("-c", "import isthmus"), "isthmus --help": ("-m", "isthmus", "--help")}
_PACKAGES = """
import json, re
from importlib.metadata import requires, version
lines = [line for line in requires("isthmus") if "extra ==" not in line]
names = [re.split(r"[^\\w.-]", line, maxsplit=1)[0] for line in lines]
print(json.dumps({name: version(name) for name in names}))
"""


def build(folder: Path) -> dict[str, Path]:
    """The sdist and the wheel of the commit, from a clone in ``folder``, by suffix."""
    clone, out = folder / "clone", folder / "dist"
    subprocess.run(["git", "clone", "--quiet", str(REPOSITORY), str(clone)], check=True)
    commit_time = subprocess.run(
        ["git", "log", "-1", "--format=%ct"], cwd=clone, check=True, capture_output=True, text=True
    ).stdout.strip()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(out)],
        cwd=clone, check=True, capture_output=True, env=environment | {"SOURCE_DATE_EPOCH": commit_time},
    )  # fmt: skip
    return {path.suffix: path for path in sorted(out.iterdir())}


def resolve() -> dict[str, Any]:
    """Direct and indirect dependencies that uv chooses in the package index, oldest and newest, for each Python."""
    command = ["uv", "pip", "compile", "pyproject.toml", "--no-header", "--no-annotate", "--no-python-downloads"]
    command += ["--python-platform", "x86_64-manylinux_2_28"]
    chosen: dict[str, Any] = {"command": " ".join(command)}
    for python in PYTHONS:
        for resolution in ("lowest-direct", "highest"):
            options = ["--python-version", python, "--resolution", resolution]
            done = subprocess.run([*command, *options], cwd=REPOSITORY, check=True, capture_output=True, text=True)
            chosen[shlex.join(options)] = done.stdout.split("\n")[:-1]
            print(f"Python {python}, {resolution}: {len(chosen[shlex.join(options)])} packages", flush=True)
    return chosen


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def environment() -> dict[str, str]:
    """Without this checkout and without network."""
    removed = {"PYTHONPATH", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE"}
    kept = {name: value for name, value in os.environ.items() if name not in removed}
    return kept | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


def run_verbs(python: str, folder: Path, demo: Path | None) -> list[dict[str, Any]]:
    """Exit code and seconds of each verb, in an empty folder; those after a failure do not run."""
    rows = []
    if demo is not None:
        shutil.copytree(demo, folder / "demo")
    for name, arguments in VERBS:
        if name == "demo" and demo is not None:
            continue
        started_s = time.perf_counter()
        done = subprocess.run(
            [python, "-m", "isthmus", *arguments], cwd=folder, env=environment(),
            input="How many legs has a cat?\n", capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        rows.append({"verb": name, "exit_code": done.returncode, "time_s": time.perf_counter() - started_s})
        print(f"{name:<16} {done.returncode:>3} {rows[-1]['time_s']:7.1f} s", flush=True)
        if done.returncode:
            print(done.stderr[-3000:], file=sys.stderr)
            break
    return rows


def start_time_s(python: str, arguments: Sequence[str], folder: Path, rounds: int) -> float:
    """Median of ``rounds`` starts of a process, after one that compiles the modules."""
    times_s = []
    for _ in range(rounds + 1):
        started_s = time.perf_counter()
        subprocess.run([python, *arguments], cwd=folder, env=environment(), check=True, stdout=subprocess.DEVNULL)
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s[1:])


def measure(python: str, wheel: Path, rounds: int, demo: Path | None) -> dict[str, Any]:
    """Install the wheel without its dependencies, and use it."""
    command = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--force-reinstall", str(wheel)]
    subprocess.run(command, check=True, env=environment())
    with tempfile.TemporaryDirectory(prefix="isthmus-package-") as name:
        folder = Path(name)
        located = subprocess.run(
            [python, "-c", "import isthmus, sys; print(isthmus.__file__); print(sys.version.split()[0])"],
            cwd=folder, env=environment(), check=True, capture_output=True, text=True,
        ).stdout.split()  # fmt: skip
        if Path(located[0]).is_relative_to(REPOSITORY):
            raise SystemExit(f"{python} imports isthmus from {located[0]}. Name an environment that has the wheel.")
        packages = subprocess.run(
            [python, "-c", _PACKAGES], cwd=folder, env=environment(), check=True, capture_output=True, text=True
        ).stdout
        print(f"Python {located[1]}")
        imports = {key: start_time_s(python, arguments, folder, rounds) for key, arguments in IMPORTS.items()}
        bare = start_time_s(python, ["-c", ""], folder, rounds)
        verbs = run_verbs(python, folder, demo)
    start_s = {"python": bare, **imports}
    return {"python": located[1], "packages": json.loads(packages), "start_s": start_s, "verbs": verbs}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", action="append", default=[], help="Python of an environment with the wheel")
    parser.add_argument("--demo", type=Path, help="folder of an earlier `isthmus demo`, which is then not run")
    parser.add_argument("--resolve", action="store_true", help="resolve the dependencies; needs uv and the index")
    parser.add_argument("--rounds", type=int, default=5, help="starts of a process (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    result: dict[str, Any] = {
        "benchmark": "package",
        "certificate": certificate(["benchmarks/package.py", *arguments]),
    }
    with tempfile.TemporaryDirectory(prefix="isthmus-package-") as name:
        first, second = (build(Path(name) / number) for number in ("first", "second"))
        files = [first[suffix] for suffix in (".whl", ".gz")]
        with zipfile.ZipFile(first[".whl"]) as archive:
            installed_bytes = sum(entry.file_size for entry in archive.infolist())
        result["files"] = [{"name": path.name, "bytes": path.stat().st_size, "sha256": sha256(path)} for path in files]
        result["installed_bytes"] = installed_bytes
        result["same_bytes"] = all(sha256(first[suffix]) == sha256(second[suffix]) for suffix in (".whl", ".gz"))
        print(f"same bytes: {result['same_bytes']}", *(f"{path.name}: {path.stat().st_size}" for path in files))
        result["environments"] = [
            measure(python, first[".whl"], chosen.rounds, chosen.demo) for python in chosen.python
        ]
    if chosen.resolve:
        result["resolutions"] = resolve()
    publish_result("package", result, record=chosen.record, out=chosen.out)
    codes = [row["exit_code"] for row in result["environments"] for row in row["verbs"]]
    if not result["same_bytes"] or any(codes):
        raise SystemExit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
