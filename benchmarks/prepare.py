"""Tokenizing text and chats: ``isthmus prepare`` compared with ``tokenizers``, Megatron-LM and TRL.

    MEGATRON_LM=checkout python benchmarks/prepare.py --record

All tokenize the same files with the same tokenizer on the same cores, in alternation and in separate processes. See
README.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from certificate import certificate, cores, publish_result
from prepare_turns.corpus import write_chats, write_texts, write_tokenizer
from rounds import median, run_turn, spread

CONTESTANTS = {
    "encode-batch": "encode_batch of tokenizers alone, on texts in memory with chat templates already applied",
    "isthmus": "isthmus.recipes.data.prepare.prepare: files in, indexed files out",
    "isthmus-command": "isthmus prepare, with the start of Python and its imports",
    "megatron-lm": "tools/preprocess_data.py, likewise (text only)",
    "trl": "dataset preparation of SFTTrainer, on a dataset that is already loaded (chats only)",
}
NOT_FOR = {"text": {"trl"}, "chat": {"megatron-lm"}, "text-quarter": set(CONTESTANTS) - {"isthmus"}}
SHARE_WANTED = 0.9
GROWTH_WANTED = 1.15
MOST_FOR_OTHERS = 0.05


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", default=",".join(CONTESTANTS), help="contestants, with commas (default: all)")
    parser.add_argument("--tokenizer", type=Path, help="folder of one (default: trained on the text, 32,000 tokens)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=cores(), help="cores of each contestant (default: all)")
    parser.add_argument("--quick", action="store_true", help="little data, to check that the benchmark runs")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    chosen.only = chosen.only.split(",")
    if unknown := set(chosen.only) - CONTESTANTS.keys():
        parser.error(f"not known: {', '.join(sorted(unknown))}")
    if "MEGATRON_LM" not in os.environ and "megatron-lm" in chosen.only:
        if chosen.record:
            parser.error("megatron-lm needs a checkout of Megatron-LM. Name it in MEGATRON_LM.")
        chosen.only.remove("megatron-lm")
    if chosen.record and chosen.quick:
        parser.error("--quick is not a measurement and is not recorded")
    return chosen


def measure(chosen: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run all contestants and return the result, without its certificate."""
    text_bytes, chats = (400_000, 200) if chosen.quick else (40_000_000, 50_000)
    files = {kind: work / f"{kind}.jsonl" for kind in ("text", "text-quarter", "chat")}
    data = {
        "text": write_texts(files["text"], text_bytes),
        "text-quarter": write_texts(files["text-quarter"], text_bytes // 4),
        "chat": write_chats(files["chat"], chats),
    }
    tokenizer = chosen.tokenizer
    if tokenizer is None:
        tokenizer = work / "tokenizer"
        write_tokenizer(tokenizer, files["text"], 2000 if chosen.quick else 32_000, 20 if chosen.quick else 800)
    turns = [(kind, name) for kind in files for name in chosen.only if name not in NOT_FOR[kind]]
    got: dict[tuple[str, str], list[dict[str, Any]]] = {turn: [] for turn in turns}
    for number in range(chosen.rounds):
        for kind, name in turns:
            with tempfile.TemporaryDirectory(dir=work) as folder:
                spec = {"contestant": name, "data": str(files[kind]), "tokenizer": str(tokenizer.absolute())}
                spec |= {"out": f"{folder}/out", "threads": chosen.threads}
                result = run_turn("prepare_turns.turn", spec, threads=chosen.threads)
            got[kind, name].append(result)
            print(f"  round {number + 1}/{chosen.rounds}  {kind:<13}{name:<16} {result['line']}", flush=True)
    rows = [_row(kind, name, results) for (kind, name), results in got.items()]
    disturbed = [
        f"{kind} {name} round {number + 1}: {turn['others_cpu_use']:.0%}"
        for (kind, name), results in got.items()
        for number, turn in enumerate(results)
        if turn["others_cpu_use"] > MOST_FOR_OTHERS
    ]
    return {
        "contestants": CONTESTANTS,
        "data": data,
        "settings": {"rounds": chosen.rounds, "threads": chosen.threads, "own_tokenizer": chosen.tokenizer is None},
        "quiet": not disturbed,
        "disturbed_turns": disturbed,
        "rows": rows,
        "claims": claims(rows),
    }


def _row(kind: str, name: str, turns: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"data": kind, "contestant": name, "tokens": turns[0]["tokens"]}
    for key in ("time_s", "tokens_per_s", "peak_rss_gib", "largest_child_rss_gib", "others_cpu_use"):
        row[key], row[f"{key}_rounds"] = median(turns, key), spread(turns, key)
    return row


def claims(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each claim with its limit, the measured value, and whether it holds."""
    values = {(row["data"], row["contestant"]): row for row in rows}
    checked: list[dict[str, Any]] = []

    def compare(kind: str, mine: str, other: str, limit: float) -> None:
        if (kind, mine) in values and (kind, other) in values:
            got = values[kind, mine]["tokens_per_s"] / values[kind, other]["tokens_per_s"]
            claim = f"{kind}: tokens/s of {mine} / {other}"
            checked.append({"claim": claim, "wanted": f">= {limit}", "got": got, "holds": got >= limit})

    for kind in ("text", "chat"):
        compare(kind, "isthmus", "encode-batch", SHARE_WANTED)
    compare("text", "isthmus-command", "megatron-lm", 1.0)
    compare("chat", "isthmus", "trl", 1.0)
    if ("text", "isthmus") in values and ("text-quarter", "isthmus") in values:
        for key, who in (("peak_rss_gib", "the process"), ("largest_child_rss_gib", "a worker")):
            got = values["text", "isthmus"][key] / values["text-quarter", "isthmus"][key]
            claim = f"memory of {who}, four times the text / once"
            checked.append({"claim": claim, "wanted": f"<= {GROWTH_WANTED}", "got": got, "holds": got <= GROWTH_WANTED})
    return checked


def show(result: dict[str, Any]) -> None:
    print(f"\n{'':<30}{'time s':>9}{'M tokens/s':>12}{'GiB':>8}{'GiB, child':>12}")
    for row in result["rows"]:
        print(
            f"{row['data']:<14}{row['contestant']:<16}{row['time_s']:>9.2f}{row['tokens_per_s'] / 1e6:>12.3f}"
            f"{row['peak_rss_gib']:>8.3f}{row['largest_child_rss_gib']:>12.3f}"
        )
    if not result["quiet"]:
        print(f"NOT QUIET, not a valid measurement: {'; '.join(result['disturbed_turns'])}")
    for claim in result["claims"]:
        verdict = "holds" if claim["holds"] else "FAILS"
        print(f"{verdict}  {claim['claim']}: {claim['got']:.3f} (wanted {claim['wanted']})")


def main(arguments: list[str]) -> None:
    chosen = parse(arguments)
    certified = certificate(["benchmarks/prepare.py", *arguments])
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        result = {"benchmark": "prepare", "certificate": certified} | measure(chosen, Path(folder))
    show(result)
    publish_result("prepare", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
