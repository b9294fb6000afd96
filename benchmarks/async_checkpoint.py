"""Steps during a background write of a checkpoint beside steps without one, and how long a save blocks training.

    python benchmarks/async_checkpoint.py --record

One run of a Qwen3 model with 57.9M parameters on one rank (state in a checkpoint: 16 bytes a parameter), first with
checkpoint.async=true, then without. A step counts as one during a write if a write overlaps all of it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from certificate import certificate, publish_result
from rounds import CpuWatch

MOST_FOR_OTHERS = 0.05

MODEL = {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 512, "intermediate_size": 1536,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 32000,
    "max_position_embeddings": 2048, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "hidden_act": "silu", "initializer_range": 0.02, "attention_bias": False,
}  # fmt: skip


def run(*, asynchronous: bool, steps: int, every: int, tokens: int, threads: int, quick: bool) -> dict[str, Any]:
    """Train and return seconds of steps, of writes, and of what a save blocks."""
    from isthmus.config.load import load_config
    from isthmus.engine.checkpoint import background_saves, checkpoint_writer
    from isthmus.recipes.run import run_recipe
    from isthmus.train.reporter import Reporter

    ends: list[tuple[float, float]] = []
    writes: list[tuple[float, float]] = []
    blocked: list[float] = []
    step, save, complete = Reporter.step, background_saves.Saves.save, checkpoint_writer.CheckpointWriter.complete

    def timed_step(self: Any, metrics: Any) -> None:
        ends.append((time.monotonic(), metrics.step_time_s))
        step(self, metrics)

    def timed_save(self: Any, *args: Any, **kwargs: Any) -> None:
        started_s = time.monotonic()
        save(self, *args, **kwargs)
        blocked.append(time.monotonic() - started_s)

    def timed_write(self: Any, group: Any = None) -> None:
        started_s = time.monotonic()
        complete(self, group)
        writes.append((started_s, time.monotonic()))

    model = MODEL | ({"hidden_size": 128, "num_hidden_layers": 1, "vocab_size": 512} if quick else {})
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        settings: dict[str, Any] = {
            "model.config": model, "model.init": "random", "data.mock": True, "out": f"{folder}/run",
            "data.seq_length": tokens, "train.micro_batch_size": 1, "train.global_batch_size": 1,
            "train.steps": steps, "train.threads": threads, "checkpoint.every": every, "checkpoint.keep": 1,
            "checkpoint.async": asynchronous, "checkpoint.save_final": False, "checkpoint.export_final": False,
            "logging.to": [], "platform": "cpu",
        }  # fmt: skip
        Reporter.step, background_saves.Saves.save = timed_step, timed_save  # type: ignore[method-assign]
        checkpoint_writer.CheckpointWriter.complete = timed_write  # type: ignore[method-assign]
        try:
            run_recipe(load_config("pretrain", None, flags=settings))
        finally:
            Reporter.step, background_saves.Saves.save = step, save  # type: ignore[method-assign]
            checkpoint_writer.CheckpointWriter.complete = complete  # type: ignore[method-assign]
    spans = [(end_s - seconds, end_s, seconds) for end_s, seconds in ends[2:]]
    during = [s for start, end, s in spans if any(begun <= start and end <= done for begun, done in writes)]
    apart = [s for start, end, s in spans if all(end <= begun or done <= start for begun, done in writes)]
    return {
        "asynchronous": asynchronous,
        "step_s": statistics.median(apart),
        "steps": len(apart),
        "step_during_write_s": statistics.median(during) if during else None,
        "steps_during_write": len(during),
        "write_s": statistics.median(done - begun for begun, done in writes),
        "blocked_s": statistics.median(blocked),
        "first_blocked_s": blocked[0],
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=120, help="of each run (default: %(default)s)")
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="of a step (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="runs with and without (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of training (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to check that it runs")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    sizes = {"steps": 8, "every": 3, "tokens": 16} if chosen.quick else {
        "steps": chosen.steps, "every": chosen.every, "tokens": chosen.tokens
    }  # fmt: skip
    certified = certificate(["benchmarks/async_checkpoint.py", *arguments])
    watch = CpuWatch()
    runs = [
        run(asynchronous=value, threads=chosen.threads, quick=chosen.quick, **sizes)
        for _ in range(chosen.rounds)
        for value in (True, False)
    ]
    others = watch.shares()["others_cpu_use"]
    result: dict[str, Any] = {"benchmark": "async-checkpoint", "certificate": certified, "runs": runs}
    result |= {"others_cpu_use": others, "quiet": others <= MOST_FOR_OTHERS}
    for row in runs:
        print(json.dumps(row))
    ratios = [row["step_during_write_s"] / row["step_s"] for row in runs if row["step_during_write_s"] is not None]
    result["slower_during_write"] = statistics.median(ratios) - 1
    print(f"a step during a write takes {result['slower_during_write']:+.1%}; others used {others:.0%} of the CPU")
    publish_result("async-checkpoint", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
