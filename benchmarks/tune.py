"""The matmuls of a micro batch with the choices of `isthmus tune` and with the defaults, on a CPU.

The file is measured first, as a user does. Then both contestants compute all matmuls in alternation, so that a choice
by noise shows no gain.

python benchmarks/tune.py --record
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from certificate import REPOSITORY, certificate, publish_result
from rounds import CpuWatch

sys.path.insert(0, str(REPOSITORY / "src"))

from isthmus.engine.linear.matmul import use_table
from isthmus.engine.linear.matmul_table import MatmulTable
from isthmus.engine.linear.tuned_matmuls import TunedMatmuls, read_tuned
from isthmus.platforms.detect import detect
from isthmus.recipes.plan.model_plan import open_run_model, plan_model
from isthmus.recipes.plan.step_matmuls import StepMatmul, step_matmuls, token_counts
from isthmus.tools.tune import choose
from isthmus.tools.tune.measure import Operands
from isthmus.tools.tune.run_tune import config_to_tune, tune_run

MOST_FOR_OTHERS = 0.05
SIZES = {
    "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
}  # fmt: skip


def contestants(matmuls: list[StepMatmul], tuned: TunedMatmuls) -> dict[str, Callable[[], float]]:
    """Each computes all matmuls once and returns milliseconds; a matmul counts as often as a micro batch has it."""
    cpu = torch.device("cpu")
    operands = [(Operands(matmul, cpu), matmul.count) for matmul in matmuls]
    threads = torch.get_num_threads()

    def total(table: MatmulTable | None, number: int) -> float:
        use_table(table)
        torch.set_num_threads(number)
        result = 0.0
        for tensors, count in operands:
            start = time.perf_counter()
            tensors.run()
            result += count * (time.perf_counter() - start)
        use_table(None)
        torch.set_num_threads(threads)
        return result * 1e3

    table = MatmulTable(tuned.choices)
    return {"default": lambda: total(None, threads), "tuned": lambda: total(table, tuned.threads or threads)}


def measure(precision: str, tokens: int, rounds: int, *, quick: bool) -> dict[str, Any]:
    model = {
        "model_type": "qwen3", "vocab_size": 256 if quick else 32000, "num_hidden_layers": 8,
        "max_position_embeddings": tokens, "tie_word_embeddings": False, **(SMALL if quick else SIZES),
    }  # fmt: skip
    words = ["platform=cpu", f"train.precision={precision}", f"data.seq_length={tokens}", "data.mock=true"]
    config = config_to_tune(None, [*words, "train.steps=1", f"model.config={model}"], None)
    watch = CpuWatch()
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        result, path = tune_run(config, Path(folder) / "tune.json", lambda line: print(line, file=sys.stderr))
        tuned = read_tuned(path)
    matmuls = step_matmuls(
        plan_model(open_run_model(config), config, world_size=1), config, precision, detect("cpu"), token_counts(config)
    )
    times: dict[str, list[float]] = {"default": [], "tuned": []}
    for number in range(rounds + 1):
        for name, run in contestants(matmuls, tuned).items():
            milliseconds = run()
            times[name] += [milliseconds] * (number > 0)  # the first round warms up
    medians = {f"{name}_ms": statistics.median(of) for name, of in times.items()}
    return {
        "precision": precision, "tokens": tokens, "threads": result.threads, "default_threads": result.default_threads,
        **medians, "gain": medians["default_ms"] / medians["tuned_ms"], "gain_while_tuning": result.as_dict()["gain"],
        "rounds_ms": times, "matmuls": [row.as_dict() for row in result.rows], **watch.shares(),
    }  # fmt: skip


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1024, help="of a micro batch (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=9, help="of both contestants (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny matmuls: only checks that it runs")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    certified = certificate(["benchmarks/tune.py", *arguments])
    if chosen.quick:
        choose.SECONDS = 0.0
    tokens, rounds = (32, 1) if chosen.quick else (chosen.tokens, chosen.rounds)
    rows = [measure(precision, tokens, rounds, quick=chosen.quick) for precision in ("fp32", "bf16")]
    for row in rows:
        print(
            f"{row['precision']}  default {row['default_ms']:.4g} ms  tuned {row['tuned_ms']:.4g} ms  "
            f"gain {row['gain']:.3f}  threads {row['default_threads']} -> {row['threads']}  "
            f"others {row['others_cpu_use']:.0%}"
        )
    quiet = all(row["others_cpu_use"] <= MOST_FOR_OTHERS for row in rows)
    result = {"benchmark": "tune", "certificate": certified, "quiet": quiet, "rows": rows}
    publish_result("tune", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
