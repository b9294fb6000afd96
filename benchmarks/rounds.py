"""Runs contestants in alternation, each in a separate process, so that noise on the machine affects all of them."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def run_turn(module: str, spec: dict[str, Any], *, threads: int, timeout_s: float = 3600.0) -> dict[str, Any]:
    """Run ``python -m module SPEC RESULT`` with ``threads`` threads and return the result that it wrote.

    Raises:
        RuntimeError: it failed; with the end of its stderr.
    """
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        spec_file, result_file = Path(folder) / "spec.json", Path(folder) / "result.json"
        spec_file.write_text(json.dumps(spec))
        paths = [str(HERE), str(HERE.parent / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(paths),
            "OMP_NUM_THREADS": str(threads),
            "MKL_NUM_THREADS": str(threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "HF_DATASETS_CACHE": folder,
        }
        done = subprocess.run(
            [sys.executable, "-m", module, str(spec_file), str(result_file)],
            env=environment, cwd=folder, capture_output=True, text=True, timeout=timeout_s,
        )  # fmt: skip
        if done.returncode or not result_file.is_file():
            raise RuntimeError(f"{module} {spec} failed with code {done.returncode}:\n{done.stderr[-4000:]}")
        result: dict[str, Any] = json.loads(result_file.read_text())
        return result


def take_turns(
    contestants: dict[str, tuple[str, dict[str, Any]]], *, rounds: int, threads: int
) -> dict[str, list[dict[str, Any]]]:
    """Run every contestant once per round, in the same order each time: A B C A B C.

    Args:
        contestants: name -> (module, its spec).
        rounds: number of rounds.
        threads: of each contestant.

    Returns:
        name -> the result of each round.
    """
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in contestants}
    for number in range(rounds):
        for name, (module, spec) in contestants.items():
            started_s = time.monotonic()
            result = run_turn(module, spec, threads=threads)
            results[name].append(result)
            took_s = time.monotonic() - started_s
            print(f"  round {number + 1}/{rounds}  {name:<24} {result.get('line', '')}  ({took_s:.0f} s)", flush=True)
    return results


def median(results: Sequence[dict[str, Any]], key: str) -> float:
    """The median of ``key`` over the rounds."""
    return statistics.median(float(result[key]) for result in results)


def spread(results: Sequence[dict[str, Any]], key: str) -> list[float]:
    """All values of ``key`` in the order of the rounds."""
    return [float(result[key]) for result in results]


def turn_files() -> tuple[dict[str, Any], Path]:
    """In a contestant's process: its spec, and the path for its result."""
    spec_file, result_file = sys.argv[1:]
    spec: dict[str, Any] = json.loads(Path(spec_file).read_text())
    return spec, Path(result_file)


class CpuWatch:
    """Measures the CPU time of this process and its children, and that of other processes and the hypervisor."""

    def __init__(self) -> None:
        self._wall_s, self._own_s, self._all_s = time.perf_counter(), _own_cpu_s(), _machine_cpu_s()

    def shares(self) -> dict[str, float]:
        """``cpu_use`` by this process and ``others_cpu_use`` by all others, as shares of the time of all cores."""
        total_s = (time.perf_counter() - self._wall_s) * (os.cpu_count() or 1)
        own_s = _own_cpu_s() - self._own_s
        others_s = max(0.0, _machine_cpu_s() - self._all_s - own_s)
        return {"cpu_use": own_s / total_s, "others_cpu_use": others_s / total_s}


def _own_cpu_s() -> float:
    """CPU time of this process and of the children it has waited for."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def _machine_cpu_s() -> float:
    """Non-idle time of all cores since boot, from /proc/stat."""
    user, nice, system, _idle, _wait, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def peak_rss_gib() -> float:
    """Peak resident memory of this process, with mapped file pages, in GiB (2^30 bytes)."""
    return _status("VmHWM")


def rss_gib() -> float:
    """Resident memory of this process."""
    return _status("VmRSS")


def anonymous_rss_gib() -> float:
    """Resident memory of this process without file pages."""
    return _status("RssAnon")


def _status(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 2**20
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark needs Linux to measure memory")
