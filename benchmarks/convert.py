"""Conversion between formats: Isthmus compared with ``cp`` and ``sync`` of the same bytes, and with transformers.

    python benchmarks/convert.py --record

Each contestant converts the same folders on the same disk in a separate process, with torch imported and the source in
the page cache before the clock starts. They run in alternation, and medians are reported. The clock stops when all
bytes are on the disk.
See README.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from certificate import certificate, cores, publish_result
from convert_turns.model_folder import SHAPES, TINY, write_model
from convert_turns.turn import SOURCES
from rounds import median, run_turn, spread, take_turns

CONTESTANTS = {
    "cp": "cp -r of the Hugging Face folder, then sync: the cost of the bytes alone",
    "hf-to-torch_dist": "isthmus convert HF OUT",
    "torch_dist-to-hf": "isthmus convert MEGATRON OUT",
    "hf-to-legacy-tp8": "isthmus convert HF OUT --to torch --tp 8",
    "legacy-tp8-to-hf": "isthmus convert LEGACY OUT",
    "verify": "isthmus verify HF MEGATRON: both sides read, nothing written",
    "transformers": "from_pretrained, then save_pretrained: Hugging Face to Hugging Face (of the smallest model)",
}
CONVERSIONS = [name for name in CONTESTANTS if "-to-" in name]
MANY = "20000-tensors"
RATIO_WANTED = 1.5
MEMORY_WANTED_GIB = 1.0
DEEPSEEK_V3 = {"tensors": 90_000, "bytes": 700e9}
WORKERS = 16
MOST_FOR_OTHERS = 0.15
"""Largest share of CPU time that other processes may use in a run; it includes the kernel's writeback threads."""
SHORTEST_JUDGED_S = 0.5
"""The share is not checked in shorter runs, since the system counts time in steps of 10 ms."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--models", default=",".join(SHAPES), help="with commas (default: %(default)s)")
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="contestants, with commas (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=cores(), help="of each contestant (default: all cores)")
    parser.add_argument("--work", type=Path, help="folder for 25 GB of files (default: the system's temporary folder)")
    parser.add_argument("--quick", action="store_true", help="tiny models, to check that the benchmark runs")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    chosen.only, chosen.models = chosen.only.split(","), chosen.models.split(",")
    if unknown := (set(chosen.only) - CONTESTANTS.keys()) | (set(chosen.models) - SHAPES.keys()):
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    if chosen.record and chosen.quick:
        parser.error("--quick is not a measurement and is not recorded")
    return chosen


def measure(chosen: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run all contestants and return the result, without its certificate."""
    rows: list[dict[str, Any]] = []
    models: dict[str, Any] = {}
    disturbed: list[str] = []
    for model in chosen.models:
        shape = (TINY if chosen.quick else SHAPES)[model]
        folder = work / model
        models[model] = asdict(shape) | write_model(folder / "hf", shape)
        print(
            f"{model}: {models[model]['tensor_bytes'] / 1e9:.2f} GB in {models[model]['tensors']} tensors", flush=True
        )
        only = [name for name in chosen.only if name != "transformers" or model == next(iter(SHAPES))]
        for source in sorted({source for name in only for source in SOURCES[name]} - {"hf"}):
            spec = {"folder": str(folder), "contestant": f"hf-to-{source}", "keep_as": source}
            run_turn("convert_turns.turn", spec, threads=chosen.threads)
        turns = {name: ("convert_turns.turn", {"folder": str(folder), "contestant": name}) for name in only}
        results = take_turns(turns, rounds=chosen.rounds, threads=chosen.threads)
        disturbed += [
            f"{model} {name} round {number + 1}: {turn['others_cpu_use']:.0%}"
            for name, got in results.items()
            for number, turn in enumerate(got)
            if turn["others_cpu_use"] > MOST_FOR_OTHERS and turn["time_s"] > SHORTEST_JUDGED_S
        ]
        rows += [_row(name, model, models[model], got) for name, got in results.items()]
        shutil.rmtree(folder)
    for row in rows:
        base = next((r for r in rows if r["contestant"] == "cp" and r["model"] == row["model"]), None)
        if base is not None and base is not row:
            row["time_vs_cp"] = row["time_s"] / base["time_s"]
    return {
        "contestants": CONTESTANTS,
        "models": models,
        "settings": {"rounds": chosen.rounds, "threads": chosen.threads, "page_cache": "warm"},
        "quiet": not disturbed,
        "disturbed_turns": disturbed,
        "rows": rows,
        "claims": claims(rows),
        "costs": costs(rows),
    }


def _row(name: str, model: str, size: dict[str, Any], turns: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"contestant": name, "model": model, "tensors": size["tensors"]}
    row["bytes"] = size["tensor_bytes"]
    for key in ("time_s", "import_s", "memory_added_gib", "others_cpu_use"):
        row[key], row[f"{key}_rounds"] = median(turns, key), spread(turns, key)
    return row | {"gb_per_s": size["tensor_bytes"] / 1e9 / row["time_s"]}


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each claim with its limit, the measured value, and whether it holds."""
    results: list[dict[str, Any]] = []

    def add(claim: str, limit: float, got: float) -> None:
        results.append({"claim": claim, "wanted": f"<= {limit}", "got": got, "holds": got <= limit})

    for row in rows:
        name = f"{row['model']}: {row['contestant']}"
        if row["contestant"] in CONVERSIONS and row["model"] != MANY and "time_vs_cp" in row:
            add(f"{name} / cp + sync, imports included", RATIO_WANTED, row["time_vs_cp"])
        if row["contestant"] in [*CONVERSIONS, "verify"]:
            add(f"{name}, GiB of memory beyond torch", MEMORY_WANTED_GIB, row["memory_added_gib"])
    return results


def costs(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Seconds per tensor and per GB, fitted to all models (without imports), and a projection from them.

    The fit is ``time = a * tensors + b * bytes`` with least squares of relative errors.
    """
    values: dict[str, Any] = {}
    for name in CONTESTANTS:
        mine = [row for row in rows if row["contestant"] == name]
        if len(mine) < 3:  # two models fit exactly
            continue
        times = np.array([row["time_s"] - row["import_s"] for row in mine])
        sizes = np.array([[row["tensors"], row["bytes"]] for row in mine], dtype=np.float64)
        (per_tensor, per_byte), *_ = np.linalg.lstsq(sizes / times[:, None], np.ones(len(mine)), rcond=None)
        fitted = sizes @ np.array([per_tensor, per_byte])
        tensors, size = DEEPSEEK_V3["tensors"], DEEPSEEK_V3["bytes"]
        values[name] = {
            "ms_per_tensor": per_tensor * 1e3,
            "s_per_gb": per_byte * 1e9,
            "largest_relative_error": float(np.abs(fitted / times - 1).max()),
            "projected_deepseek_v3": {
                "one_disk_s": per_tensor * tensors + per_byte * size,
                f"{WORKERS}_workers_s": per_tensor * tensors + per_byte * size / WORKERS,
            },
        }
    note = (
        f"projected, not measured: {DEEPSEEK_V3['tensors']} tensors, {DEEPSEEK_V3['bytes'] / 1e9:.0f} GB. One disk; "
        f"or {WORKERS} workers that share the bytes evenly, each with such a disk and the full cost per tensor."
    )
    return {"projection": note} | values if values else {}


def show(result: dict[str, Any]) -> None:
    print(f"\n{'':<34}{'time s':>9}{'imports':>9}{'x cp':>8}{'GB/s':>8}{'GiB beyond torch':>18}")
    for row in result["rows"]:
        ratio = row.get("time_vs_cp")
        print(
            f"{row['model']:<15}{row['contestant']:<19}{row['time_s']:>9.2f}{row['import_s']:>9.2f}"
            f"{'' if ratio is None else f'{ratio:.2f}':>8}{row['gb_per_s']:>8.2f}{row['memory_added_gib']:>18.3f}"
        )
    for name, cost in result["costs"].items():
        if name == "projection":
            print(cost)
            continue
        item, many = cost["projected_deepseek_v3"].values()
        print(
            f"{name:<19}{cost['ms_per_tensor']:>8.3f} ms per tensor{cost['s_per_gb']:>8.3f} s per GB; "
            f"projected {item / 60:.1f} min on one disk, {many / 60:.1f} min with {WORKERS} workers"
        )
    if not result["quiet"]:
        print(f"NOT QUIET, not a valid measurement: {'; '.join(result['disturbed_turns'])}")
    for claim in result["claims"]:
        verdict = "holds" if claim["holds"] else "FAILS"
        print(f"{verdict}  {claim['claim']}: {claim['got']:.3f} (wanted {claim['wanted']})")


def main(arguments: list[str]) -> None:
    chosen = parse(arguments)
    certified = certificate(["benchmarks/convert.py", *arguments])
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-", dir=chosen.work) as folder:
        result = {"benchmark": "convert", "certificate": certified} | measure(chosen, Path(folder))
    show(result)
    publish_result("convert", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
