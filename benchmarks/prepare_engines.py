"""``isthmus prepare`` by the processes of this machine and by a local Ray cluster, and by Ray under random kills.

    python benchmarks/prepare_engines.py --record

Both engines tokenize the same files with the same number of cores, in alternation. Then random worker processes of Ray
are killed while it tokenizes; the output must be that of the local engine, byte for byte. Throughput is per core and
second of wall time, and per second of CPU time of the processes that tokenize, which other processes of the machine
disturb less. Needs Ray and psutil.
"""

from __future__ import annotations

import argparse
import random
import resource
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import ray
from certificate import certificate, cores, publish_result
from prepare_turns.corpus import write_texts, write_tokenizer
from rounds import median, spread

from isthmus.recipes.data import prepare_shards
from isthmus.recipes.data.prepare import prepare

SHARE = 0.9
"""Least throughput of Ray, relative to the local engine."""
TASK = "ray::complete_shard"
KILL_S = (1.0, 4.0)
"""Least and most seconds between two kills."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=40, help="text of a run, in MB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=cores(), help="cores of both engines")
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--quick", action="store_true", help="only check that the benchmark runs")
    parser.add_argument("--record", action="store_true", help="write the result to results/")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.quick:
        chosen.mb, chosen.kills = 2, 1
    prepare_shards.SHARD_BYTES = 1 << (18 if chosen.quick else 21)  # enough shards of a small input
    result: dict[str, Any] = {"certificate": certificate(sys.argv)}
    result["certificate"]["packages"]["ray"] = ray.__version__
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        result |= measure(chosen, Path(folder))
    publish_result("prepare-engines", result, record=chosen.record, out=chosen.out)
    for claim in result["claims"]:
        print(f"{'holds' if claim['holds'] else 'FAILS'}  {claim['claim']}: {claim['got']} (wanted {claim['wanted']})")


def measure(chosen: argparse.Namespace, work: Path) -> dict[str, Any]:
    write_texts(work / "all.jsonl", chosen.mb * 1_000_000)
    files = split_lines(work / "all.jsonl", 8)
    write_tokenizer(
        work / "tokenizer", work / "all.jsonl", 2000 if chosen.quick else 32_000, 20 if chosen.quick else 400
    )
    ray.init(num_cpus=chosen.threads, include_dashboard=False, log_to_driver=False, logging_level="error")
    prepare(files, work / "warm", work / "tokenizer", engine="ray")  # workers import the libraries
    runs: dict[str, list[dict[str, Any]]] = {"local": [], "ray": []}
    for number in range(chosen.rounds):
        for engine, results in runs.items():
            results.append(run(files, work / f"{engine}{number}", work / "tokenizer", engine, chosen.threads))
            print(f"  round {number + 1}/{chosen.rounds}  {engine:<6} {results[-1]}", flush=True)
    expected = outputs(work / "local0")
    kills = kill_test(files, work, work / "tokenizer", chosen.kills, expected)
    ray.shutdown()
    same = all(outputs(work / f"{name}{k}") == expected for name in runs for k in range(chosen.rounds))
    rows = [
        {"engine": name, "tokens": results[0]["tokens"]}
        | {key: median(results, key) for key in ("time_s", "tokens_per_s_per_core", "tokens_per_cpu_s")}
        | {f"{key}_rounds": spread(results, key) for key in ("time_s", "tokens_per_s_per_core", "tokens_per_cpu_s")}
        for name, results in runs.items()
    ]
    ratio, cpu_ratio = (rows[1][key] / rows[0][key] for key in ("tokens_per_s_per_core", "tokens_per_cpu_s"))
    claims = [
        claim("tokens/s per core of ray / local", f">= {SHARE}", ratio, ratio >= SHARE),
        claim("tokens per CPU second of ray / local", f">= {SHARE}", cpu_ratio, cpu_ratio >= SHARE),
        claim("the same bytes from both engines", "true", same, same),
        claim(f"tokens lost after {kills['kills']} kills", "0", kills["tokens_lost"], kills["tokens_lost"] == 0),
        claim("the same bytes after the kills", "true", kills["same_bytes"], kills["same_bytes"]),
    ]
    settings = {"mb": chosen.mb, "cores": chosen.threads, "shard_bytes": prepare_shards.SHARD_BYTES}
    return {"settings": settings, "rows": rows, "kills": kills, "claims": claims}


def claim(text: str, wanted: str, got: object, holds: bool) -> dict[str, Any]:
    return {"claim": text, "wanted": wanted, "got": got, "holds": holds}


def split_lines(path: Path, count: int) -> list[Path]:
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    files = [path.with_name(f"part{number}.jsonl") for number in range(count)]
    for number, file in enumerate(files):
        file.write_text("".join(lines[number::count]), encoding="utf-8")
    return files


def outputs(prefix: Path) -> dict[str, bytes]:
    return {suffix: Path(f"{prefix}{suffix}").read_bytes() for suffix in (".bin", ".idx", ".json")}


def run(files: list[Path], out: Path, tokenizer: Path, engine: str, threads: int) -> dict[str, Any]:
    before_cpu_s, before_s = cpu_s(), time.perf_counter()
    workers = {"workers": threads} if engine == "local" else {}
    done = prepare(files, out, tokenizer, engine=engine, start_method="fork", **workers)  # type: ignore[arg-type]
    time_s, used_s = time.perf_counter() - before_s, cpu_s() - before_cpu_s
    return {
        "tokens": done.stats.tokens,
        "time_s": time_s,
        "tokens_per_s_per_core": done.stats.tokens / time_s / threads,
        "tokens_per_cpu_s": done.stats.tokens / used_s,
    }


def cpu_s() -> float:
    """CPU time of this process, its ended children, and the tasks of Ray."""
    usage = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(part.ru_utime + part.ru_stime for part in usage) + sum(sum(p.cpu_times()[:2]) for p in workers())


def workers(busy: bool = False) -> list[psutil.Process]:
    """Worker processes of Ray below this process; ``busy``: those that tokenize now."""
    result = []
    for process in psutil.Process().children(recursive=True):
        try:
            name = " ".join(process.cmdline())
        except psutil.Error:
            continue
        if name.startswith(TASK if busy else "ray::"):
            result.append(process)
    return result


def kill_test(files: list[Path], work: Path, tokenizer: Path, kills: int, expected: dict[str, bytes]) -> dict[str, Any]:
    """Prepare again and again until ``kills`` busy workers were killed at random instants."""
    generator, killed, runs, lost, same = random.Random(0), [0], 0, 0, True
    ended = threading.Event()

    def kill() -> None:
        while killed[0] < kills and not ended.wait(generator.uniform(*KILL_S)):
            if targets := workers(busy=True):
                generator.choice(targets).kill()
                killed[0] += 1

    prepare_shards.SHARD_BYTES = 1 << 18  # a shard takes less time than the start of a worker
    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    reference = prepare_tokens(expected)
    while killed[0] < kills and thread.is_alive():
        out = work / f"killed{runs}"
        prepare(files, out, tokenizer, engine="ray")
        result = outputs(out)
        lost, same, runs = lost + abs(prepare_tokens(result) - reference), same and result == expected, runs + 1
        print(f"  run {runs}: {killed[0]} kills", flush=True)
    ended.set()
    return {"kills": killed[0], "runs": runs, "tokens": reference, "tokens_lost": lost, "same_bytes": same}


def prepare_tokens(result: dict[str, bytes]) -> int:
    return len(result[".bin"]) // 2  # uint16


if __name__ == "__main__":
    main()
