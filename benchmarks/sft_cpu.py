"""Supervised fine-tuning on a CPU: Isthmus compared with transformers' Trainer, TRL's SFTTrainer and peak matmul speed.

    python benchmarks/sft_cpu.py --data alpaca.json --tokenizer llama2-tokenizer --record

Every contestant trains the same model from the same weights on the same tokens with the same loss mask, optimizer and
gradient accumulation, in a separate process with all cores. They run in alternation, and medians are reported. See
README.md.
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
from rounds import median, spread, take_turns
from sft.ceiling_process import RATES
from sft.workload import TINY, Shape, Turn, make_workload

CEILINGS = {"gflops": "of_ceiling", "own_shapes_gflops": "of_own_shapes_ceiling", "torch_mm_gflops": "of_torch_mm"}
"""Peak rates that a step is compared with, and the suffix of the share of each."""
ISTHMUS, HUGGINGFACE, CEILING = "sft.isthmus_turn", "sft.huggingface_turn", "sft.ceiling"
CONTESTANTS = {
    "isthmus": (ISTHMUS, "alone"),
    "isthmus-packed": (ISTHMUS, "packed"),
    "trainer-padded": (HUGGINGFACE, "padded"),
    "trainer-grouped": (HUGGINGFACE, "grouped"),
    "trainer-flattened": (HUGGINGFACE, "flattened"),
    "trl": (HUGGINGFACE, "trl"),
    "trl-flattened": (HUGGINGFACE, "trl-flattened"),
    "trl-packed": (HUGGINGFACE, "trl-packed"),
}
CEILING_WANTED = {"fp32": 0.85, "bf16": 0.60}
MOST_FOR_OTHERS = 0.05
"""Largest share of CPU time that other processes may use in a run; beyond it the result is not a valid measurement."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="chat records (default: the documentation of this Python)")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer folder (default: trained on the documentation)")
    parser.add_argument("--precision", default="fp32,bf16", help="default: %(default)s")
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="contestants, with commas (default: all)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each contestant (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=96, help="a run trains on them once (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=cores(), help="of each contestant (default: all cores)")
    parser.add_argument("--no-profile", dest="profile", action="store_false", help="leave the profile out")
    parser.add_argument(
        "--quick", action="store_true", help="a tiny model and two steps, to check that the benchmark runs"
    )
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    chosen.only, chosen.precision = chosen.only.split(","), chosen.precision.split(",")
    if unknown := set(chosen.only) - CONTESTANTS.keys() or set(chosen.precision) - CEILING_WANTED.keys():
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    if chosen.record and chosen.quick:
        parser.error("--quick is not a measurement and is not recorded")
    return chosen


def measure(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all contestants and return the result, without its certificate."""
    shape = TINY if chosen.quick else Shape()
    seq_length = 128 if chosen.quick else 512
    print("creating the model and the samples", flush=True)
    workload = make_workload(
        folder,
        data=chosen.data,
        tokenizer=chosen.tokenizer,
        seq_length=seq_length,
        num_samples=chosen.samples,
        shape=shape,
    )
    drawn = workload["data"]
    print(f"  {drawn['prepared']}; drawn: {drawn['samples']} samples, {drawn['tokens']} tokens", flush=True)
    rows: list[dict[str, Any]] = []
    ceilings: dict[str, Any] = {}
    profiles: dict[str, Any] = {}
    disturbed: list[str] = []
    turn: dict[str, Any] = {"folder": str(folder), "seq_length": seq_length}
    turn["timed_tokens"] = 1 if chosen.quick else drawn["tokens"] - drawn["samples"]
    for precision in chosen.precision:
        print(precision, flush=True)
        ceiling_spec = {
            "precision": precision,
            "shape": asdict(shape),
            "tokens": Turn(precision=precision, style="", **turn).micro_batch_size * seq_length,
            "loss_token_share": workload["data"]["loss_token_share"],
            "squares": [128] if chosen.quick else [1024, 1536, 2048, 3072, 4096],
            "budget_s": 0.01 if chosen.quick else 0.3,
        }
        isthmus_options = {"profile": chosen.profile, "ceiling": ceiling_spec}
        selected = {name: CONTESTANTS[name] for name in chosen.only}
        contestants = {
            name: (
                module,
                Turn(precision=precision, style=style, **turn, **(isthmus_options if module == ISTHMUS else {})).spec(),
            )
            for name, (module, style) in selected.items()
        }
        results = take_turns(
            {"ceiling": (CEILING, ceiling_spec), **contestants}, rounds=chosen.rounds, threads=chosen.threads
        )
        ceiling = results.pop("ceiling")
        ceilings[precision] = {
            # The maximum, not the median: a disturbed round would lower the ceiling and raise the shares.
            **{rate: max(spread(ceiling, rate)) for rate in CEILINGS},
            "rounds": ceiling,
        }
        disturbed += [
            f"{precision} {name} round {number + 1}: {turn_result['others_cpu_use']:.0%}"
            for name, turns in ({"ceiling": ceiling} | results).items()
            for number, turn_result in enumerate(turns)
            if turn_result["others_cpu_use"] > MOST_FOR_OTHERS
        ]
        rows += [_row(name, precision, turns, ceilings[precision]) for name, turns in results.items()]
        profiled = {name: turns[-1]["profile"] for name, turns in results.items() if "profile" in turns[-1]}
        profiles |= {f"{name} {precision}": profile for name, profile in profiled.items()}
    return workload | {
        "settings": turn | {"folder": None, "rounds": chosen.rounds, "threads": chosen.threads},
        "quiet": not disturbed,
        "disturbed_turns": disturbed,
        "ceiling": ceilings,
        "rows": rows,
        "claims": claims(rows),
        "profile": profiles,
    }


def _row(name: str, precision: str, turns: list[dict[str, Any]], ceiling: dict[str, Any]) -> dict[str, Any]:
    """Medians of one contestant at one precision."""
    row: dict[str, Any] = {
        "contestant": name,
        "precision": precision,
        "tokens_per_s": median(turns, "tokens_per_s"),
        "tokens_per_s_rounds": spread(turns, "tokens_per_s"),
        "cpu_use_rounds": spread(turns, "cpu_use"),
        "others_cpu_use_rounds": spread(turns, "others_cpu_use"),
        "peak_rss_gib": median(turns, "peak_rss_gib"),
        "peak_rss_gib_rounds": spread(turns, "peak_rss_gib"),
        "rss_before_training_gib": median(turns, "rss_before_training_gib"),
        "first_loss": turns[0]["first_loss"],
        "step_times_s_last_round": turns[-1]["step_times_s"],
        "step_tokens": turns[-1]["step_tokens"],
    }
    for rate in ("executed_gflops", "all_logits_gflops"):
        if rate in turns[0]:
            row[rate] = median(turns, rate)
            for against, of in CEILINGS.items():
                row[f"{rate.removesuffix('_gflops')}_share_{of}"] = row[rate] / ceiling[against]
    for name in RATES:
        if (share := f"executed_share_of_{name}_beside") in turns[0]:
            row[share], row[f"{share}_rounds"] = median(turns, share), spread(turns, share)
    return row


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each claim with its limit, the measured value, and whether it holds; only if both sides have run."""
    values = {(row["contestant"], row["precision"]): row for row in rows}
    checked: list[dict[str, Any]] = []

    def check(claim: str, limit: float, got: float, *, at_most: bool = False) -> None:
        holds = got <= limit if at_most else got >= limit
        checked.append(
            {"claim": claim, "wanted": ("<= " if at_most else ">= ") + str(limit), "got": got, "holds": holds}
        )

    for precision, share in CEILING_WANTED.items():
        rivals = [row for row in rows if row["precision"] == precision and not row["contestant"].startswith("isthmus")]
        trainers = [row for row in rivals if row["contestant"].startswith("trainer")]
        for name in ("isthmus", "isthmus-packed"):
            ours = values.get((name, precision))
            if ours is None:
                continue
            if trainers:
                best = max(trainers, key=lambda row: row["tokens_per_s"])
                text = f"{precision}: tokens/s of {name} / fastest Trainer ({best['contestant']})"
                check(text, 1.3, ours["tokens_per_s"] / best["tokens_per_s"])
            packed = values.get(("trl-packed", precision))
            if packed is not None:
                check(
                    f"{precision}: tokens/s of {name} / trl-packed", 1.0, ours["tokens_per_s"] / packed["tokens_per_s"]
                )
            text = f"{precision}: executed GFLOP/s of {name} / matmul ceiling"
            check(f"{text} of torch.mm measured at its steps", share, ours["executed_share_of_torch_mm_beside"])
            check(f"{text} of the faster library measured at its steps", share, ours["executed_share_of_faster_beside"])
            check(f"{text}, the best repetition of the whole run", share, ours["executed_share_of_ceiling"])
            if rivals:
                least = min(rivals, key=lambda row: row["peak_rss_gib"])
                text = f"{precision}: peak memory of {name} / least of theirs ({least['contestant']})"
                check(text, 1.0, ours["peak_rss_gib"] / least["peak_rss_gib"], at_most=True)
            if name == "isthmus-packed" and packed is not None:
                text = f"{precision}: peak memory of {name} / trl-packed, which has as many tokens in a micro batch"
                check(text, 1.0, ours["peak_rss_gib"] / packed["peak_rss_gib"], at_most=True)
    return checked


def show(result: dict[str, Any]) -> None:
    print(f"\n{'':<26}{'tokens/s':>10}{'peak GiB':>10}{'of torch.mm':>13}{'of faster':>11}{'first loss':>12}")
    for row in result["rows"]:
        shares = [row.get(f"executed_share_of_{name}_beside") for name in RATES]
        columns = ["" if share is None else f"{share:.1%}" for share in shares]
        print(
            f"{row['precision']} {row['contestant']:<21}{row['tokens_per_s']:>10.1f}{row['peak_rss_gib']:>10.2f}"
            f"{columns[0]:>13}{columns[1]:>11}{row['first_loss']:>12.5f}"
        )
    for precision, ceiling in result["ceiling"].items():
        others = f"torch.mm {ceiling['torch_mm_gflops']:.0f}, own shapes {ceiling['own_shapes_gflops']:.0f}"
        print(f"{precision} ceiling {ceiling['gflops']:.0f} GFLOP/s, {others}")
    for name, profile in result["profile"].items():
        print(f"{name}: " + ", ".join(f"{kind} {share:.1f}%" for kind, share in profile["percent"].items()))
    if not result["quiet"]:
        print(f"NOT QUIET, not a valid measurement: {'; '.join(result['disturbed_turns'])}")
    for claim in result["claims"]:
        verdict = "holds" if claim["holds"] else "FAILS"
        print(f"{verdict}  {claim['claim']}: {claim['got']:.3f} (wanted {claim['wanted']})")


def main(arguments: list[str]) -> None:
    chosen = parse(arguments)
    missing = [name for name in ("trl", "accelerate", "datasets") if find_spec(name) is None]
    if missing and any(CONTESTANTS[name][0] == HUGGINGFACE for name in chosen.only):
        raise SystemExit(f"the other contestants need {', '.join(missing)}: pip install -e '.[bench]', or use --only")
    certified = certificate(["benchmarks/sft_cpu.py", *arguments])
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        result = {"benchmark": "sft-cpu", "certificate": certified} | measure(chosen, Path(folder))
    show(result)
    publish_result("sft-cpu", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
