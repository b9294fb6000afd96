"""Seconds that a copy of the state in memory blocks a step, and its bytes, beside a checkpoint in files.

    python benchmarks/memory_copies.py --record

Two simulated machines with a rank each, or more, and a memory folder each, train the model of async_checkpoint.py
(57.9M parameters, 16 bytes of state a parameter). A copy writes the files of all ranks to the memory folders and sends
those of a machine to the other one, over gloo on the loopback interface; a checkpoint writes them to a disk, synced.
Each in the training thread and in another one (checkpoint.async). The contestants take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from async_checkpoint import MODEL, MOST_FOR_OTHERS
from certificate import certificate, publish_result
from rounds import CpuWatch

CONTESTANTS = {
    "copy in memory": ("checkpoint.memory_every", False),
    "copy in memory, async": ("checkpoint.memory_every", True),
    "files": ("checkpoint.every", False),
    "files, async": ("checkpoint.every", True),
}
"""The setting of the steps between two saves, and ``checkpoint.async``."""


def train(settings: dict[str, Any], result: Path) -> None:
    """A rank: train, and write the seconds and bytes of its saves."""
    from isthmus.config.load import load_config
    from isthmus.engine.checkpoint.background_saves import Saves
    from isthmus.engine.checkpoint.checkpoint_writer import CheckpointWriter
    from isthmus.engine.checkpoint.memory_copies import MemoryCopies
    from isthmus.recipes.run import run_recipe
    from isthmus.train.reporter import Reporter

    steps: list[float] = []
    blocked: list[float] = []
    writes: list[float] = []
    sizes: list[int] = []
    step, save = Reporter.step, Saves.save
    to_disk, to_memory = CheckpointWriter.complete, MemoryCopies.complete

    def timed_step(self: Any, metrics: Any) -> None:
        steps.append(metrics.step_time_s)
        step(self, metrics)

    def timed_save(self: Any, *args: Any, **kwargs: Any) -> None:
        started_s = time.monotonic()
        save(self, *args, **kwargs)
        blocked.append(time.monotonic() - started_s)

    def written(writer: Any, started_s: float) -> None:
        writes.append(time.monotonic() - started_s)
        sizes.append(sum(path.stat().st_size for path in writer.final.rglob("*") if path.is_file()))

    def timed_to_disk(self: Any, group: Any = None) -> None:
        started_s = time.monotonic()
        to_disk(self, group)
        written(self, started_s)

    def timed_to_memory(self: Any, writer: Any, group: Any = None) -> None:
        started_s = time.monotonic()
        to_memory(self, writer, group)
        written(writer, started_s)

    Reporter.step, Saves.save = timed_step, timed_save  # type: ignore[method-assign]
    CheckpointWriter.complete = timed_to_disk  # type: ignore[method-assign]
    MemoryCopies.complete = timed_to_memory  # type: ignore[method-assign]
    run_recipe(load_config("pretrain", None, flags=settings))
    result.write_text(json.dumps({"steps": steps, "blocked": blocked, "writes": writes, "bytes": sizes}))


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def run(
    name: str, *, steps: int, every: int, tokens: int, local_ranks: int, memory: Path, quick: bool
) -> dict[str, Any]:
    """Train on two machines; the slowest rank counts."""
    world_size, port = 2 * local_ranks, str(free_port())
    interval, is_async = CONTESTANTS[name]
    model = MODEL | ({"hidden_size": 128, "num_hidden_layers": 1, "vocab_size": 512} if quick else {})
    with tempfile.TemporaryDirectory() as path, tempfile.TemporaryDirectory(dir=memory) as copies:
        folder, ranks = Path(path), []
        for rank in range(world_size):
            machine, local_rank = divmod(rank, local_ranks)
            (memory_dir := Path(copies, str(machine))).mkdir(exist_ok=True)
            settings = {
                "model.config": model, "model.init": "random", "data.mock": True, "out": f"{folder}/run",
                "data.seq_length": tokens, "train.micro_batch_size": 1, "train.global_batch_size": world_size,
                "train.steps": steps, "train.threads": 1, "checkpoint.keep": 1, "checkpoint.save_final": False,
                "checkpoint.export_final": False, "checkpoint.memory_dir": str(memory_dir), "logging.to": [],
                "platform": "cpu", interval: every, "checkpoint.async": is_async,
            }  # fmt: skip
            task = json.dumps({"settings": settings, "result": f"{folder}/{rank}.json"})
            variables = {
                "RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": local_ranks,
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            environment = os.environ | {key: str(value) for key, value in variables.items()}
            command = [sys.executable, "-W", "ignore", __file__, "--task", task]
            ranks.append(subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
        errors = [rank.communicate()[1].decode() for rank in ranks]
        if any(rank.returncode for rank in ranks):
            raise SystemExit(f"{name}: a rank failed:\n{max(errors, key=len)[-2000:]}")
        results = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    slowest = {key: list(map(max, zip(*(result[key] for result in results), strict=True))) for key in results[0]}
    return {
        "contestant": name,
        "step_s": statistics.median(slowest["steps"][2:]),
        "saves": len(slowest["blocked"]),
        "blocked_s": statistics.median(slowest["blocked"]),
        "most_blocked_s": max(slowest["blocked"]),
        "write_s": statistics.median(slowest["writes"]),
        "bytes_in_a_folder": max(slowest["bytes"]),
        "folders": 2 if "memory" in name else 1,
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=40, help="of each run (default: %(default)s)")
    parser.add_argument("--every", type=int, default=8, help="steps between saves (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="of a step and rank (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=1, help="of each machine (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each contestant (default: %(default)s)")
    parser.add_argument("--memory", type=Path, default=Path("/dev/shm"), help="the tmpfs (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to check that it runs")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result there")
    parser.add_argument("--task", type=json.loads, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.task is not None:
        train(chosen.task["settings"], Path(chosen.task["result"]))
        return
    sizes = {"steps": 8, "every": 3, "tokens": 16} if chosen.quick else {
        "steps": chosen.steps, "every": chosen.every, "tokens": chosen.tokens
    }  # fmt: skip
    certified = certificate(["benchmarks/memory_copies.py", *arguments])
    watch, runs = CpuWatch(), []
    for _ in range(1 if chosen.quick else chosen.rounds):
        for name in CONTESTANTS:
            row = run(name, local_ranks=chosen.ranks, memory=chosen.memory, quick=chosen.quick, **sizes)
            print(json.dumps(row), flush=True)
            runs.append(row)
    others = watch.shares()["others_cpu_use"]
    result: dict[str, Any] = {"benchmark": "memory-copies", "certificate": certified, "runs": runs}
    result |= {"others_cpu_use": others, "quiet": others <= MOST_FOR_OTHERS}
    publish_result("memory-copies", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
