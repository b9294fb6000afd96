"""From a Hugging Face folder to live weights: Isthmus compared with ``cp`` and transformers.

    python benchmarks/load_weights.py --record

Each contestant loads the same ~1 GB folder in a separate process, with libraries imported and the file in the page
cache before the clock starts. They run in alternation, and medians are reported. The clock stops when every page of
every weight has been read once, so that no work is deferred. See README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from certificate import certificate, cores, publish_result
from load.model_folder import SHAPES, TINY, write_model
from rounds import median, spread, take_turns

CONTESTANTS = {
    "cp": "a copy of the same file: the cost of the bytes alone",
    "isthmus-weights": "build the Megatron-Core model and load its weights, as from_pretrained does",
    "isthmus-training": "the same with the data-parallel buffers of training: with float32 gradients",
    "from-pretrained": "transformers' AutoModelForCausalLM.from_pretrained, dtype as in the file; maps the file",
    "from-pretrained-own": "the same, then one write to each page, as the first weight update does",
}

BASES = ("cp", "from-pretrained", "from-pretrained-own")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--precision", default="bf16,fp32", help="of the file and the model (default: %(default)s)")
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="contestants, with commas (default: all)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=cores(), help="of each contestant (default: all cores)")
    parser.add_argument("--work", type=Path, help="folder for the model files (default: the system's temporary folder)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to check that the benchmark runs")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    chosen.only, chosen.precision = chosen.only.split(","), chosen.precision.split(",")
    if unknown := (set(chosen.only) - CONTESTANTS.keys()) | (set(chosen.precision) - SHAPES.keys()):
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    if chosen.record and chosen.quick:
        parser.error("--quick is not a measurement and is not recorded")
    return chosen


def measure(chosen: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run all contestants and return the result, without its certificate."""
    rows: list[dict[str, Any]] = []
    models: dict[str, Any] = {}
    for precision in chosen.precision:
        shape = TINY if chosen.quick else SHAPES[precision]
        folder = work / precision
        models[precision] = asdict(shape) | write_model(folder, shape, precision)
        print(f"{precision}: {models[precision]['file_bytes'] / 1e9:.2f} GB", flush=True)
        spec = {"folder": str(folder), "precision": precision}
        turns = {name: ("load.turn", spec | {"contestant": name}) for name in chosen.only}
        results = take_turns(turns, rounds=chosen.rounds, threads=chosen.threads)
        rows += [_row(name, precision, got) for name, got in results.items()]
    for row in rows:
        for base in BASES:
            same = [r for r in rows if r["contestant"] == base and r["precision"] == row["precision"]]
            if same and row["contestant"] != base:
                row[f"time_vs_{base}"] = row["time_s"] / same[0]["time_s"]
                if base != "cp":
                    row[f"memory_vs_{base}"] = row["peak_rss_gib"] / same[0]["peak_rss_gib"]
    return {
        "contestants": CONTESTANTS,
        "models": models,
        "settings": {"rounds": chosen.rounds, "threads": chosen.threads, "page_cache": "warm"},
        "rows": rows,
    }


def _row(name: str, precision: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"contestant": name, "precision": precision}
    for key in ("time_s", "peak_rss_gib", "rss_added_gib", "anonymous_rss_gib", "others_cpu_use"):
        row[key], row[f"{key}_rounds"] = median(turns, key), spread(turns, key)
    return row | {key: turns[0][key] for key in turns[0] if key.endswith(("_parts_s", "_bytes"))}


def show(result: dict[str, Any]) -> None:
    print(f"\n{'':<26}{'time s':>8}{'x cp':>8}{'x f_p':>8}{'x own':>8}{'peak GiB':>10}{'added GiB':>11}")
    for row in result["rows"]:
        ratios = [row.get(f"time_vs_{base}") for base in BASES]
        print(
            f"{row['precision']} {row['contestant']:<21}{row['time_s']:>8.2f}"
            + "".join(f"{'' if ratio is None else f'{ratio:.2f}':>8}" for ratio in ratios)
            + f"{row['peak_rss_gib']:>10.2f}{row['rss_added_gib']:>11.2f}"
        )


def main(arguments: list[str]) -> None:
    chosen = parse(arguments)
    if find_spec("transformers") is None:
        raise SystemExit("this benchmark needs transformers")
    certified = certificate(["benchmarks/load_weights.py", *arguments])
    if chosen.work is not None:
        chosen.work.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-", dir=chosen.work) as folder:
        result = {"benchmark": "load-weights", "certificate": certified} | measure(chosen, Path(folder))
    show(result)
    publish_result("load-weights", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
