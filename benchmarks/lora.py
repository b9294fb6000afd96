"""Steps with LoRA on a CPU: Isthmus compared with PEFT in transformers' Trainer and in TRL's SFTTrainer.

    python benchmarks/lora.py --record
    python benchmarks/lora.py --quantize nf4 --record

The model, samples and processes are those of sft_cpu.py; adapters of rank 16 are on all linear layers of the model.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from certificate import certificate, cores, publish_result
from rounds import median, spread, take_turns
from sft.workload import TINY, Shape, Turn, make_workload

ISTHMUS, HUGGINGFACE = "sft.isthmus_turn", "sft.huggingface_turn"
CONTESTANTS = {
    "isthmus": (ISTHMUS, "alone"),
    "isthmus-packed": (ISTHMUS, "packed"),
    "trainer-padded": (HUGGINGFACE, "padded"),
    "trl": (HUGGINGFACE, "trl"),
    "trl-flattened": (HUGGINGFACE, "trl-flattened"),
}
NUMBERS = ("tokens_per_s", "peak_rss_gib", "rss_before_training_gib", "others_cpu_use")
MOST_FOR_OTHERS = 0.05
"""Largest share of CPU time of other processes in a valid measurement."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rank", type=int, default=16, help="of the adapters (default: %(default)s)")
    parser.add_argument("--quantize", choices=("nf4", "int8"), help="the frozen weights, by bitsandbytes (QLoRA)")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32", help="default: %(default)s")
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="contestants, with commas (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contestant (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=48, help="a run trains on them once (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=cores(), help="of each contestant (default: all cores)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to check that the benchmark runs")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    chosen.only = chosen.only.split(",")
    if unknown := set(chosen.only) - CONTESTANTS.keys():
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    if chosen.record and chosen.quick:
        parser.error("--quick is not a measurement and is not recorded")
    return chosen


def measure(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all contestants and return the result, without its certificate."""
    seq_length = 128 if chosen.quick else 512
    shape, samples = (TINY if chosen.quick else Shape()), chosen.samples
    workload = make_workload(folder, data=None, tokenizer=None, seq_length=seq_length, num_samples=samples, shape=shape)
    drawn = workload["data"]
    timed = 1 if chosen.quick else drawn["tokens"] - drawn["samples"]
    turn = {"seq_length": seq_length, "timed_tokens": timed, "precision": chosen.precision}
    turn |= {"lora_rank": chosen.rank, "quantize": chosen.quantize}
    contestants = {
        name: (module, Turn(folder=str(folder), style=style, **turn).spec())
        for name, (module, style) in CONTESTANTS.items()
        if name in chosen.only
    }
    rounds = take_turns(contestants, rounds=chosen.rounds, threads=chosen.threads)
    rows = [
        {"contestant": name, "first_loss": turns[0]["first_loss"]}
        | {number: median(turns, number) for number in NUMBERS}
        | {f"{number}_rounds": spread(turns, number) for number in NUMBERS}
        for name, turns in rounds.items()
    ]
    quiet = max(share for row in rows for share in row["others_cpu_use_rounds"]) <= MOST_FOR_OTHERS
    settings = turn | {"rounds": chosen.rounds, "threads": chosen.threads}
    return workload | {"settings": settings, "quiet": quiet, "rows": rows, "claims": claims(rows)}


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each claim with its limit, the measured value, and whether it holds; only if both sides have run."""
    values = {row["contestant"]: row for row in rows}
    theirs = [row for row in rows if not row["contestant"].startswith("isthmus")]
    if "isthmus" not in values or not theirs:
        return []
    ours = values["isthmus"]
    fastest = max(theirs, key=lambda row: row["tokens_per_s"])
    least = min(theirs, key=lambda row: row["peak_rss_gib"])
    ratios = {
        (f"tokens/s of isthmus / {fastest['contestant']}", ">= 1.0"): ours["tokens_per_s"] / fastest["tokens_per_s"],
        (f"peak memory of isthmus / {least['contestant']}", "<= 1.0"): ours["peak_rss_gib"] / least["peak_rss_gib"],
    }
    return [
        {"claim": claim, "wanted": expected, "got": got, "holds": got >= 1 if expected[0] == ">" else got <= 1}
        for (claim, expected), got in ratios.items()
    ]


def main(arguments: list[str]) -> None:
    """Measure, print a table, and write the result if asked to."""
    chosen = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        result = {"certificate": certificate(["benchmarks/lora.py", *arguments])} | measure(chosen, Path(folder))
    for row in result["rows"]:
        print(
            f"{row['contestant']:16} {row['tokens_per_s']:8.0f} tokens/s {row['peak_rss_gib']:6.2f} GiB at most, "
            f"{row['rss_before_training_gib']:5.2f} before training, first loss {row['first_loss']:.4f}"
        )
    for claim in result["claims"]:
        print(f"{'holds' if claim['holds'] else 'FAILS'}: {claim['claim']} {claim['wanted']}, got {claim['got']:.2f}")
    publish_result("qlora" if chosen.quantize else "lora", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
