"""Start-up of a rank on a set of 10^12 tokens: seconds and memory from its files to the batches of the first steps.

    python benchmarks/large_index.py --record

The set has 10^9 texts of 1,000 tokens: an empty .bin and .idx of the sizes that these have, without blocks on the disk,
and a true manifest. Everything that a run does with a set of this size is done as it is, in a process of its own:
nothing is extrapolated. For comparison, the same steps with arrays of all samples, as smaller sets have them, are
measured for ``--samples`` texts.
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

from isthmus.data.batching.batches import Batches, BatchSettings, DocumentEnds
from isthmus.data.store.indexed_dataset import HEADER, MAGIC, open_indexed
from isthmus.data.store.manifest import dataset_record, write_manifest
from isthmus.data.store.sample_store import split
from isthmus.data.store.sample_views import text_samples
from isthmus.data.store.token_windows import TokenWindows, are_many, token_source

SAMPLES = 10**9
TOKENS = 1000
"""Of a text."""
LENGTH = 8192
STARTUP_S, MEMORY_GIB = 60.0, 1.0
_LINE = "row "


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=3_000_000, help="of the steps with arrays")
    parser.add_argument("--quick", action="store_true", help="only check that the benchmark runs")
    parser.add_argument("--record", action="store_true", help="write the result to results/")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--step", help=argparse.SUPPRESS)
    for ignored in ("--rounds", "--threads"):
        parser.add_argument(ignored, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.step is not None:
        return {"start": start, "arrays": lambda: arrays(chosen.samples)}[chosen.step]()
    if chosen.quick:
        chosen.samples = 20_000
    result: dict[str, Any] = {"certificate": certificate(sys.argv)}
    rows, compared = process("start", SAMPLES), process("arrays", chosen.samples)
    total_s, gib = sum(row["time_s"] for row in rows), max(row["gib"] for row in rows)
    claims = [
        claim("start-up on 10^9 texts, 10^12 tokens: seconds", STARTUP_S, total_s),
        claim("start-up on 10^9 texts, 10^12 tokens: GiB", MEMORY_GIB, gib),
    ]
    result |= {"samples": chosen.samples, "rows": rows, "arrays": compared, "claims": claims}
    publish_result("large-index", result, record=chosen.record, out=chosen.out)
    for title, steps in (("10^9 texts", rows), (f"{chosen.samples:,} texts, arrays of all", compared)):
        print(title)
        for row in steps:
            print(f"  {row['step']:<10} {row['time_s']:8.2f} s  {row['gib']:7.3f} GiB")
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


def start() -> None:
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        prefix = Path(folder) / "text"
        write_files(prefix, SAMPLES)
        before = peak_gib()
        manifest = prefix.with_name("text.json")
        assert are_many([manifest], LENGTH)
        source, _ = timed("open", lambda: token_source(str(prefix), manifest), before)
        windows = timed("windows", lambda: TokenWindows.from_sources([source], LENGTH), before)
        train, _ = timed("split", lambda: windows.split([0.001], seed=0), before)
        documents = DocumentEnds(eod=1, reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True)
        settings = BatchSettings(
            seq_length=LENGTH, micro_batch_size=1, global_batch_size=64, packing=True, documents=documents
        )
        batches = timed("batches", lambda: Batches(train, settings), before)
        timed("steps", lambda: [batches.step(step) for step in range(16)], before)


def arrays(samples: int) -> None:
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        prefix = Path(folder) / "text"
        write_index(prefix, samples)
        before = peak_gib()
        indexed = timed("open", lambda: open_indexed(prefix), before)
        indexed = replace(indexed, manifest=manifest_of(samples, {".bin": 0, ".idx": 0}))
        store = timed("windows", lambda: text_samples(indexed, LENGTH)[0], before)
        train = timed("split", lambda: split(store, [0.001])[0], before)
        settings = BatchSettings(seq_length=LENGTH, micro_batch_size=1, global_batch_size=64, packing=True)
        timed("batches", lambda: Batches(train, settings), before)


def manifest_of(samples: int, sizes: dict[str, int]) -> dict[str, Any]:
    files = {suffix: {"bytes": size, "xxh3_128": ""} for suffix, size in sizes.items()}
    counts = {"sequences": samples, "documents": samples, "tokens": samples * TOKENS, "max_token_id": 0}
    return {"pair": dataset_record(np.dtype(np.uint16), files=files, **counts), "kind": "text"}


def write_files(prefix: Path, samples: int) -> None:
    """Files of the right sizes without content, and their manifest."""
    sizes = {".bin": samples * TOKENS * 2, ".idx": HEADER.size + samples * 12 + (samples + 1) * 8}
    for suffix, size in sizes.items():
        Path(f"{prefix}{suffix}").touch()
        os.truncate(f"{prefix}{suffix}", size)
    write_manifest(prefix, manifest_of(samples, sizes))


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
