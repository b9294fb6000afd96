"""Start-up of a rank on a set of many samples: seconds and memory of each step, and the order of 10^9 sequences.

    python benchmarks/large_index.py --record

The files are an index of ``--samples`` texts of 1,001 tokens and an empty .bin of the size that it describes, so a set
of any size needs the disk of its index only. Steps that are linear in the samples are measured at a size that fits, and
multiplied to 10^9. The order of 10^9 sequences is measured as it is, in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from certificate import certificate, publish_result

from isthmus.data.batching.batches import Batches, BatchSettings
from isthmus.data.store.indexed_dataset import HEADER, MAGIC, open_indexed
from isthmus.data.store.manifest import dataset_record
from isthmus.data.store.mixture import SequenceOrder
from isthmus.data.store.sample_store import split
from isthmus.data.store.sample_views import text_samples

SAMPLES = 10**9
TOKENS = 1001
"""Of a sample."""
STARTUP_S, MEMORY_GIB = 60.0, 1.0
_LINE = "row "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=3_000_000, help="of the measured steps")
    parser.add_argument("--quick", action="store_true", help="only check that the benchmark runs")
    parser.add_argument("--record", action="store_true", help="write the result to results/")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--step", help=argparse.SUPPRESS)
    for ignored in ("--rounds", "--threads"):
        parser.add_argument(ignored, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.step is not None:
        return {"order": order_step, "steps": lambda: steps(chosen.samples)}[chosen.step]()
    if chosen.quick:
        chosen.samples = 20_000
    result: dict[str, Any] = {"certificate": certificate(sys.argv)}
    rows = process("steps", chosen.samples)
    for row in rows:
        row |= {f"{key}_at_10^9": row[key] / chosen.samples * SAMPLES for key in ("time_s", "gib")}
    (order,) = process("order", SAMPLES)
    total_s, gib = sum(row["time_s_at_10^9"] for row in rows), max(row["gib_at_10^9"] for row in rows)
    claims = [
        claim("the order of 10^9 sequences: seconds to the first 1,024", STARTUP_S, order["time_s"]),
        claim("the order of 10^9 sequences: GiB", MEMORY_GIB, order["gib"]),
        claim("all steps of 10^9 samples, extrapolated: seconds", STARTUP_S, total_s),
        claim("all steps of 10^9 samples, extrapolated: GiB", MEMORY_GIB, gib),
    ]
    result |= {"samples": chosen.samples, "rows": rows, "order": order, "claims": claims}
    publish_result("large-index", result, record=chosen.record, out=chosen.out)
    for row in rows:
        at_full_size = f"at 10^9: {row['time_s_at_10^9']:9.0f} s {row['gib_at_10^9']:6.0f} GiB"
        print(f"{row['step']:<10} {row['time_s']:8.2f} s  {row['gib']:7.3f} GiB   {at_full_size}")
    for item in claims:
        print(f"{'holds' if item['holds'] else 'FAILS'}  {item['claim']}: {item['got']:.3g} (wanted {item['wanted']})")


def claim(text: str, limit: float, got: float) -> dict[str, Any]:
    return {"claim": text, "wanted": f"<= {limit:g}", "got": got, "holds": got <= limit}


def process(step: str, samples: int) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--step", step, "--samples", str(samples)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    lines = [line.removeprefix(_LINE).split() for line in done.stdout.splitlines() if line.startswith(_LINE)]
    return [{"step": name, "time_s": float(time_s), "gib": float(gib)} for name, time_s, gib in lines]


def timed(step: str, call: Callable[[], Any], before_gib: float) -> Any:
    """Run a step and print its time and the peak of memory so far, above that of the imports."""
    start_s = time.perf_counter()
    value = call()
    print(f"{_LINE}{step} {time.perf_counter() - start_s} {peak_gib() - before_gib}", flush=True)
    return value


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def order_step() -> None:
    before = peak_gib()
    timed("order", lambda: [SequenceOrder([SAMPLES], [1], seed=0, shuffle=True).at(k) for k in range(1024)], before)


def steps(samples: int) -> None:
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        prefix = Path(folder) / "text"
        write_index(prefix, samples)
        before = peak_gib()
        indexed = timed("open", lambda: open_indexed(prefix), before)
        files = {suffix: {"bytes": 0, "xxh3_128": ""} for suffix in (".bin", ".idx")}
        counts = {"sequences": samples, "documents": samples, "tokens": samples * TOKENS, "max_token_id": 0}
        manifest = {"pair": dataset_record(np.dtype(np.uint16), files=files, **counts)}
        indexed = replace(indexed, manifest=manifest)
        store = timed("windows", lambda: text_samples(indexed, 4096)[0], before)
        train = timed("split", lambda: split(store, [0.001])[0], before)
        settings = BatchSettings(seq_length=4096, micro_batch_size=1, global_batch_size=8, packing=True)
        timed("pack", lambda: Batches(train, settings), before)


def write_index(prefix: Path, samples: int) -> None:
    """An .idx of texts of equal length, and a .bin without content."""
    numbers = np.arange(samples, dtype=np.int64)
    with Path(f"{prefix}.idx").open("wb") as file:
        file.write(HEADER.pack(MAGIC, 1, 8, samples, samples + 1))
        file.write(np.full(samples, TOKENS, np.int32).tobytes())
        file.write((numbers * TOKENS * 2).tobytes())
        file.write(np.arange(samples + 1, dtype=np.int64).tobytes())
    Path(f"{prefix}.bin").touch()
    os.truncate(f"{prefix}.bin", samples * TOKENS * 2)


if __name__ == "__main__":
    main()
