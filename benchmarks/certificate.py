"""The certificate of a recorded result: commit, machine, package versions, command and date."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGES = (
    "torch", "triton", "megatron-core", "transformers", "trl", "accelerate", "datasets", "tokenizers", "safetensors",
    "torchao", "flash-attn",
)  # fmt: skip


def certificate(arguments: Sequence[str]) -> dict[str, Any]:
    """Everything that a result depends on besides the benchmark's code.

    ``arguments`` is the command line, script first. Folders outside of the checkout are removed from it.
    """
    cpu, flags = _cpu()
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "commit": _git("rev-parse", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")),
        "command": shlex.join(["python", *(_without_folders(argument) for argument in arguments)]),
        "platform": "cpu",
        "cpu": cpu,
        "cpu_matrix_instructions": [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in flags],
        "cores": cores(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average_before": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: result for name in PACKAGES if (result := _version(name))},
    }


def source_sha256() -> str:
    """Identifies the source where the checkout has no git history, as on a machine that it was copied to."""
    digest = hashlib.sha256()
    folders = [REPOSITORY / name for name in ("src", "benchmarks", "tests/gpu")]
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".yaml")):
        digest.update(f"{path.relative_to(REPOSITORY)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def result_path(benchmark: str, certified: dict[str, Any]) -> Path:
    """``results/<date>_<benchmark>_<processor>-<n>-cores.json``, or with the name and number of the GPUs."""
    of_gpu = "device_name" in certified
    machine = re.sub(r"[^a-z0-9]+", "-", certified["device_name" if of_gpu else "cpu"].lower()).strip("-") or "cpu"
    number = f"{certified['devices']}-gpus" if of_gpu else f"{certified['cores']}-cores"
    name = f"{certified['date'][:10]}_{benchmark}_{machine}-{number}.json"
    return Path(__file__).resolve().parent / "results" / name


def publish_result(benchmark: str, result: dict[str, Any], *, record: bool, out: Path | None) -> None:
    """Write a result, which has its certificate, to ``results/`` or to ``out``; without both, nowhere."""
    path = result_path(benchmark, result["certificate"]) if record else out
    if path is not None:
        write_result(path, result)
        print(f"written to {path}")


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result as indented JSON; an existing file is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".tmp-{path.name}")
    staged.write_text(json.dumps(_rounded(result), indent=1) + "\n", encoding="utf-8")
    staged.replace(path)


def _rounded(value: Any) -> Any:
    """The same structure with floats rounded to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _without_folders(argument: str) -> str:
    """Replace an absolute path by one relative to the checkout, or, outside of it, by its last component."""
    name, equals, value = argument.partition("=") if argument.startswith("--") else ("", "", argument)
    path = Path(value)
    if path.is_absolute():
        value = str(path.relative_to(REPOSITORY)) if path.is_relative_to(REPOSITORY) else path.name
    return name + equals + value if equals or not name else name


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> tuple[str, set[str]]:
    """The processor's name and its feature flags, from /proc if it exists."""
    info = Path("/proc/cpuinfo")
    text = info.read_text() if info.exists() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.+)$", text, re.MULTILINE)
    return (name[1] if name else platform.processor() or sys.platform), set(flags[1].split() if flags else ())
