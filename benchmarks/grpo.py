"""A step of GRPO, from the prompts to the updated weights: Isthmus beside TRL.

    python benchmarks/grpo.py --record

Both have the same model, prompts, reward function, number of answers and number of new tokens, one update on each
rollout, and the loss dapo. Contestants run in alternation, each in a process of its own. See README.md.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from certificate import certificate, cores, publish_result
from grpo_turns.workload import Turn, build
from rounds import CpuWatch, median, spread, take_turns

MODULES = {"isthmus": "grpo_turns.isthmus_turn", "trl": "grpo_turns.trl_turn"}
MOST_FOR_OTHERS = 0.05
"""Largest share of CPU time that other processes may use; beyond it the result is not a valid measurement."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--answers", type=int, default=64, help="of a step (default: %(default)s)")
    parser.add_argument("--group-size", type=int, default=8, help="answers to a prompt (default: %(default)s)")
    parser.add_argument("--new-tokens", type=int, default=64, help="of each answer (default: %(default)s)")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=4, help="the first is not timed (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=cores(), help="default: all cores")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to check that the benchmark runs")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    if chosen.quick:
        chosen.answers, chosen.group_size, chosen.new_tokens = 8, 4, 4
        chosen.steps, chosen.rounds, chosen.micro_batch_size = 3, 1, 4
    if chosen.record and chosen.quick:
        parser.error("--quick is not a measurement and is not recorded")
    return chosen


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Run all contestants and return the result, without its certificate."""
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as root:
        model, prompts, parameters = build(Path(root), tiny=chosen.quick)
        names = ("answers", "group_size", "new_tokens", "micro_batch_size", "steps")
        settings = {name: getattr(chosen, name) for name in names}
        turn = Turn(model=str(model), prompts=str(prompts), **settings)
        watch = CpuWatch()
        contestants = {name: (module, asdict(turn)) for name, module in MODULES.items()}
        results = take_turns(contestants, rounds=chosen.rounds, threads=chosen.threads)
        others = watch.shares()["others_cpu_use"]
    rows = []
    for name, runs in results.items():
        keys = runs[0].keys() - {"line"}
        row = {"contestant": name, **{key: median(runs, key) for key in sorted(keys)}}
        row |= {"step_s_rounds": spread(runs, "step_s"), "step_cpu_s_rounds": spread(runs, "step_cpu_s")}
        row["times_isthmus"] = row["step_s"] / median(results["isthmus"], "step_s")
        row["cpu_times_isthmus"] = row["step_cpu_s"] / median(results["isthmus"], "step_cpu_s")
        rows.append(row)
        print(
            f"{name:<8}{row['step_s']:>8.2f} s a step, {row['times_isthmus']:.2f} x isthmus; CPU time "
            f"{row['step_cpu_s']:.1f} s, {row['cpu_times_isthmus']:.2f} x",
            flush=True,
        )
    settings |= {"parameters": parameters, "rounds": chosen.rounds, "threads": chosen.threads}
    return {"settings": settings, "others_cpu_use": others, "quiet": others <= MOST_FOR_OTHERS, "rows": rows}


def main(arguments: list[str]) -> None:
    chosen = parse(arguments)
    certified = certificate(["benchmarks/grpo.py", *arguments])
    result = {"benchmark": "grpo", "certificate": certified} | measure(chosen)
    publish_result("grpo", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
