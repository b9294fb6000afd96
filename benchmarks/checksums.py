"""The cost of checksums: writing an export and a checkpoint, and loading a model, with and without them.

    python benchmarks/checksums.py --record

The source is in the page cache. Writing ends when all bytes are on the disk and the folder is published. Runs with and
without checksums alternate in one process. Besides the elapsed time, the CPU time of the process is recorded, which
other programs on the machine disturb less. See README.md.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from certificate import certificate, result_path, write_result
from convert_turns.model_folder import SHAPES, TINY, write_model
from rounds import median

from isthmus.convert.transfer import convert
from isthmus.files.checked_files import trusting
from isthmus.files.file_checksums import WrittenBlocks
from isthmus.hf.model_folder import ModelFolder

WANTED_SHARE = 0.03
"""Of the time to write."""
_MODEL = "1.5gb"


@contextlib.contextmanager
def no_checksums() -> Iterator[None]:
    """Neither made nor checked, as before they existed."""
    with (
        trusting(),
        mock.patch.object(WrittenBlocks, "add", lambda *_: None),
        mock.patch.object(WrittenBlocks, "forget", lambda *_: None),
        mock.patch("isthmus.hf.staged_folder.write_checksums", lambda *_, **__: None),
    ):
        yield


def load(folder: Path) -> None:
    """Read all tensors as a rank does that loads the whole model."""
    with ModelFolder.open(folder) as opened:
        targets: dict[Any, torch.Tensor] = {}
        for name, info in opened.tensors.items():
            target = targets.setdefault((info.dtype, info.shape), torch.empty(info.shape, dtype=info.dtype))
            opened.read(name, into=target)


def timed(run: Callable[[], object], *, checksums: bool) -> dict[str, float]:
    with contextlib.nullcontext() if checksums else no_checksums():
        started_s, cpu_s = time.perf_counter(), time.process_time()
        run()
        return {"time_s": time.perf_counter() - started_s, "cpu_s": time.process_time() - cpu_s}


def measure(work: Path, rounds: int, *, quick: bool, pause: Path | None) -> dict[str, Any]:
    """Alternate runs with and without checksums of each task."""
    shape = (TINY if quick else SHAPES)[_MODEL]
    written = write_model(work / "plain", shape)
    convert(work / "plain", work / "hf", "hf")  # with checksums, for the readers
    shutil.rmtree(work / "plain")
    tasks: dict[str, Callable[[], object]] = {
        "write hf": lambda: convert(work / "hf", work / "out", "hf"),
        "write torch_dist": lambda: convert(work / "hf", work / "out", "torch_dist"),
        "load": lambda: load(work / "hf"),
    }
    values: dict[str, Any] = {}
    for name, task in tasks.items():
        turns: dict[bool, list[dict[str, float]]] = {True: [], False: []}
        for number in range(rounds + 1):
            for checksums in (True, False) if number % 2 else (False, True):
                while pause and pause.exists():
                    time.sleep(2)
                # What is read is not checked while writing is measured.
                with trusting() if name != "load" else contextlib.nullcontext():
                    took = timed(task, checksums=checksums)
                shutil.rmtree(work / "out", ignore_errors=True)
                if number:  # the first round warms up
                    turns[checksums].append(took)
        values[name] = _summary(turns, written["tensor_bytes"])
        print(name, values[name], flush=True)
    return {"model": written, "tasks": values}


def _summary(turns: dict[bool, list[dict[str, float]]], num_bytes: int) -> dict[str, Any]:
    medians = {
        kind: {key: median(rows, key) for key in ("time_s", "cpu_s")}
        for kind, rows in (("with", turns[True]), ("without", turns[False]))
    }
    added_s = {key: medians["with"][key] - medians["without"][key] for key in ("time_s", "cpu_s")}
    return {
        **medians,
        "added_time_share": added_s["time_s"] / medians["without"]["time_s"],
        "added_cpu_s": added_s["cpu_s"],
        "gb_per_s": {kind: num_bytes / 1e9 / medians[kind]["time_s"] for kind in medians},
        "turns": {"with": turns[True], "without": turns[False]},
    }


def main() -> int:
    """Run the benchmark, and record it with ``--record``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--work", type=Path, help="folder for 5 GB of files (default: the system's temporary folder)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to check that the benchmark runs")
    parser.add_argument("--pause", type=Path, help="wait while this file exists")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results")
    arguments = parser.parse_args()
    certified = certificate(sys.argv)
    with tempfile.TemporaryDirectory(dir=arguments.work, prefix="isthmus-checksums-") as work:
        result = measure(Path(work), arguments.rounds, quick=arguments.quick, pause=arguments.pause)
    if arguments.record:
        result["wanted_share"] = WANTED_SHARE
        write_result(result_path("checksums", certified), {"certificate": certified, **result})
    return 0


if __name__ == "__main__":
    sys.exit(main())
