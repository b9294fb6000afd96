"""Training speed of one rank with one and with all threads, on a quiet machine and on one that others use too.

The contestants alternate: `isthmus sft` without any setting, with one thread, with one per core, with threads that wait
in a loop (the default of the OpenMP library), and a plain loop over a transformers model. The others are processes that
compute without pause, one per core, which the benchmark starts and stops itself.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from certificate import certificate, cores, publish_result
from rounds import median, run_turn, spread, turn_files

SEQ_LENGTH, BATCH = 256, 4
SHAPES: dict[str, dict[str, int]] = {
    "small": {
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32,
    },
    "large": {},
}  # fmt: skip
"""Sizes that differ from those of ``sft.workload.Shape``."""
SPINS = {"GOMP_SPINCOUNT": "300000"}
"""What libgomp does if nothing is set: 300,000 rounds in a loop before a thread sleeps."""


_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"
"""Ends with this process, even if that is killed."""


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Processes that compute without pause."""
    others = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def isthmus_turn(spec: dict[str, Any]) -> list[float]:
    """Tokens per second of each step of the real command."""
    folder = Path(spec["folder"])
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as out:
        words = ["sft", "--model", str(folder / "model"), "--data", str(folder / "prepared")]
        words += ["--out", f"{out}/run", f"train.steps={spec['steps']}", f"train.global_batch_size={BATCH}"]
        words += [f"train.micro_batch_size={BATCH}", f"data.seq_length={SEQ_LENGTH}", "data.valid_fraction=0"]
        words += ["checkpoint.save_final=false", "checkpoint.export_final=false", "logging.to=[]"]
        environment = {name: value for name, value in os.environ.items() if name not in spec["unset"]}
        environment |= spec["environment"]
        subprocess.run([sys.executable, "-m", "isthmus", *words], env=environment, check=True, capture_output=True)
        rows = map(json.loads, Path(out, "run", "metrics.jsonl").read_text().splitlines())
        return [row["tokens_per_s"] for row in rows if "tokens_per_s" in row]


def transformers_turn(spec: dict[str, Any]) -> list[float]:
    """A plain loop over padded batches of the same samples, with fused AdamW."""
    import torch
    from sft.workload import Turn
    from torch.nn.utils.rnn import pad_sequence
    from transformers import AutoModelForCausalLM

    turn = Turn(folder=spec["folder"], precision="fp32", style="plain")
    samples, speeds = turn.samples(), []
    model: Any = AutoModelForCausalLM.from_pretrained(turn.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for step in range(spec["steps"]):
        started_s = time.perf_counter()
        rows = [torch.from_numpy(samples[(step * BATCH + k) % len(samples)][0].astype("int64")) for k in range(BATCH)]
        labels = pad_sequence(rows, batch_first=True, padding_value=-100)
        mask = labels >= 0
        model(input_ids=labels.clamp(min=0), attention_mask=mask.long(), labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        speeds.append(int(mask.sum()) / (time.perf_counter() - started_s))
    return speeds


def contestants(folder: Path, steps: int, threads: int) -> dict[str, tuple[int, dict[str, Any]]]:
    """Name, with the number of threads -> (threads, spec)."""
    common = {"folder": str(folder), "steps": steps, "environment": {}, "unset": ()}
    isthmus, plain = common | {"program": "isthmus"}, common | {"program": "transformers"}
    spinning = isthmus | {"environment": SPINS}
    return {
        "isthmus": (threads, isthmus | {"unset": ("OMP_NUM_THREADS",)}),
        "isthmus-1": (1, isthmus),
        f"isthmus-{threads}": (threads, isthmus),
        f"isthmus-{threads}-spinning": (threads, spinning),
        "transformers-1": (1, plain),
        f"transformers-{threads}": (threads, plain),
    }


def measure(chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run all contestants in alternation, without and with load."""
    from sft.workload import TINY, Shape, make_workload  # not above: the turns of Isthmus need no transformers

    shape = TINY if chosen.quick else Shape(vocab_size=8192, **SHAPES[chosen.size])
    workload = make_workload(
        folder, data=chosen.data, tokenizer=None, seq_length=SEQ_LENGTH, num_samples=400, shape=shape
    )
    values: dict[tuple[int, str], list[dict[str, Any]]] = {}
    for number in range(chosen.rounds):
        for others in sorted({0, chosen.others}):
            for name, (threads, spec) in contestants(folder, chosen.steps, chosen.threads).items():
                if chosen.only and name not in chosen.only.split(","):
                    continue
                with busy(others):
                    result = run_turn("shared_cores", spec, threads=threads)
                values.setdefault((others, name), []).append(result)
                print(f"round {number + 1}  {others} others  {name:<24} {result['tokens_per_s']:9.1f}", flush=True)
    rows = [
        {"contestant": name, "others": others, "tokens_per_s": median(turns, "tokens_per_s"),
         "tokens_per_s_rounds": spread(turns, "tokens_per_s")}
        for (others, name), turns in values.items()
    ]  # fmt: skip
    settings = {"size": chosen.size, "steps": chosen.steps, "rounds": chosen.rounds, "threads": chosen.threads}
    return workload | {"settings": settings, "rows": rows}


def show(rows: list[dict[str, Any]]) -> None:
    loads = sorted({row["others"] for row in rows})
    print(f"\n{'median tokens/s':<34}" + "".join(f"{f'{others} others':>12}" for others in loads))
    for name in dict.fromkeys(row["contestant"] for row in rows):
        speeds = {row["others"]: row["tokens_per_s"] for row in rows if row["contestant"] == name}
        print(f"{name:<34}" + "".join(f"{speeds[others]:>12,.0f}" for others in loads))


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, help="chat records (default: the documentation of this Python)")
    parser.add_argument("--size", choices=list(SHAPES), default="small", help="of the model (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="of each contestant (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="runs of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=cores(), help="of the second contestant (default: all cores)")
    parser.add_argument("--others", type=int, default=cores(), help="busy processes (default: one per core)")
    parser.add_argument("--only", help="contestants, with commas (default: all)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to check that the benchmark runs")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    certified = certificate(["benchmarks/shared_cores.py", *arguments])
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        result = {"benchmark": "shared-cores", "certificate": certified} | measure(chosen, Path(folder))
    show(result["rows"])
    publish_result("shared-cores", result, record=chosen.record, out=chosen.out)


def turn() -> None:
    """The process of a contestant."""
    spec, result_file = turn_files()
    speeds = (isthmus_turn if spec["program"] == "isthmus" else transformers_turn)(spec)
    result_file.write_text(json.dumps({"tokens_per_s": statistics.median(speeds[2:])}))


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1].endswith("spec.json"):
        turn()
    else:
        main(sys.argv[1:])
