"""Kills commands at random instants and runs them again: the result has to be that of an undisturbed run.

    python benchmarks/torture.py --n 1000 --seed 0 --work /tmp/torture

Half of the kills are at a random time, half before a random system call that changes a file of the output. The same
command then runs again, and may be killed again. At the end the output is compared with that of an undisturbed run:
all files bit by bit, and all rows of metrics.jsonl except for times. A kill of one rank of two also has to end the
other rank. Cases that are recorded in WORK/cases.jsonl are not run again: the campaign may be interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certificate import REPOSITORY, certificate, result_path, write_result

TESTS = REPOSITORY / "tests"
LOST_RANK_S = 90.0
"""Within this time the other rank has to end."""
TIMES = {"tokens_per_s", "tflops_per_device", "mfu", "memory_gib", "step_time_s"}
"""Keys of metrics.jsonl that differ between equal runs."""
UNCOMPARED = ("tensorboard/", "trackers.json")
"""Of a run folder: logs of other programs, which also have the points of interrupted runs."""
OWN_CONTENT = (".metadata", "checksums.json")
"""Has a random number of each save, or the hash of such a file: only its presence is compared."""


@dataclass(frozen=True, slots=True)
class Kind:
    """A command and what it writes below the folder of a case."""

    args: Callable[[Path], Sequence[str | Path]]
    """From the folder with the inputs; the output is ``out`` in the current folder."""
    ranks: int = 1
    victims: int = 1
    """Of the ranks; those that are left have to end by themselves."""
    weight: int = 1
    publishes: bool = False
    """Whether a complete output is refused (73) when the command runs again."""


def _train(*more: str) -> Callable[[Path], list[str | Path]]:
    settings = (
        "data.seq_length=64 data.test_fraction=0.1 train.global_batch_size=4 train.steps=6 train.eval_every=2 "
        "optim.lr=1e-3 checkpoint.keep=2 checkpoint.keep_best=true eval.generate=true eval.max_new_tokens=4"
    ).split()

    def args(inputs: Path) -> list[str | Path]:
        files = ["--model", inputs / "model", "--data", inputs / "chats.json", "--out", "out"]
        return ["sft", *files, *settings, "eval.prompts=[Say the number 4.]", *more]

    return args


def _convert(source: str, *more: str) -> Callable[[Path], list[str | Path]]:
    return lambda inputs: ["convert", inputs / source, "out", *more]


def _prepare(*more: str) -> Callable[[Path], list[str | Path]]:
    return lambda inputs: [
        "prepare", inputs / "chats.json", "out/data", "--tokenizer", inputs / "model", "--kind", "chat", *more
    ]  # fmt: skip


KINDS = {
    "train": Kind(_train("checkpoint.every=2", "--hf-every", "4"), weight=5),
    # Evaluations and checkpoints at different steps.
    "train, uneven": Kind(_train("checkpoint.every=3", "checkpoint.keep=1"), weight=3),
    "train, lora": Kind(_train("lora.rank=2", "checkpoint.every=2"), weight=2),
    "train, 2 ranks": Kind(_train("checkpoint.every=2", "parallel.tp=2"), ranks=2, victims=2, weight=3),
    "train, 1 rank of 2": Kind(_train("checkpoint.every=3"), ranks=2, weight=3),
    "convert to torch_dist": Kind(_convert("model"), weight=2, publishes=True),
    "convert to legacy": Kind(_convert("model", "--to", "torch", "--tp", "2"), weight=2, publishes=True),
    "convert from torch_dist": Kind(_convert("torch_dist", "--to", "hf"), weight=2, publishes=True),
    "convert from legacy": Kind(_convert("legacy", "--to", "hf"), publishes=True),
    "merge": Kind(lambda inputs: ["merge", inputs / "model", inputs / "adapter", "out"], publishes=True),
    "prepare": Kind(_prepare("--workers", "1"), weight=2, publishes=True),
    "prepare, 2 workers": Kind(_prepare("--workers", "2"), publishes=True),
}


def make_inputs(folder: Path, isthmus: Any) -> None:
    """A tiny model, chats, checkpoints of the model and an adapter."""
    from faults.conftest import CHATS, tiny_qwen3

    folder.mkdir(parents=True)
    tiny_qwen3(folder / "model")
    (folder / "chats.json").write_text(json.dumps(CHATS))
    commands = {
        "torch_dist": ["convert", folder / "model", "torch_dist"],
        "legacy": ["convert", folder / "model", "legacy", "--to", "torch", "--tp", "2"],
        "lora": [*_train("lora.rank=2")(folder), "--out", "lora"],
    }
    for name, command in commands.items():
        done = isthmus(*command, cwd=folder)
        if done.returncode:
            raise SystemExit(f"{name}: {done}")
    (folder / "lora" / "adapter").rename(folder / "adapter")
    shutil.rmtree(folder / "lora")


class Campaign:
    """Runs cases one after the other in a folder."""

    def __init__(self, work: Path, isthmus: Any) -> None:
        """``isthmus`` is the fork server."""
        self._work, self._isthmus = work, isthmus
        self._case, self._inputs = work / "case", work / "inputs"
        self._expected: dict[str, tuple[dict[str, Any], float, list[int]]] = {}
        """By kind: the result, the time in s and the number of calls by rank of an undisturbed run."""
        if not self._inputs.exists():
            make_inputs(self._inputs, isthmus)

    def run(self, number: int, seed: int, kinds: Sequence[str]) -> dict[str, Any]:
        """Run a case; ``lost`` of its record is what differs, None if nothing does."""
        chance = random.Random(f"{seed} {number}")
        name = chance.choices(kinds, [KINDS[kind].weight for kind in kinds])[0]
        expected, time_s, calls = self._undisturbed(name)
        self._clean()
        kills: list[dict[str, Any]] = []
        row = {"case": number, "seed": seed, "kind": name, "kills": kills}
        while len(kills) < 3:
            victims = chance.sample(range(KINDS[name].ranks), KINDS[name].victims)
            by_call = chance.random() < 0.5 and calls[victims[0]] > 0
            at = chance.randint(1, calls[victims[0]]) if by_call else chance.uniform(0.0, time_s)
            kills.append(self._killed(name, victims, at, by_call=by_call))
            if (lost := self._lost(name, kills[-1])) or chance.random() < 0.75:
                break
        return row | {"lost": lost or self._difference(name, expected)}

    def _clean(self) -> None:
        shutil.rmtree(self._case, ignore_errors=True)
        (self._case / "out").mkdir(parents=True)
        (self._case / "out").rmdir()

    def _start(self, name: str, faults: Sequence[dict[str, str]]) -> Any:
        from faults.hosts import rank_variables

        kind = KINDS[name]
        args = [str(arg) for arg in kind.args(self._inputs)]
        of_ranks = rank_variables(kind.ranks) if kind.ranks > 1 else [{}]
        ranks = [(args, variables | fault) for variables, fault in zip(of_ranks, faults, strict=True)]
        return self._isthmus.start_ranks([ranks], cwd=self._case)

    def _undisturbed(self, name: str) -> tuple[dict[str, Any], float, list[int]]:
        from faults.failing_calls import fault

        if name not in self._expected:
            self._clean()
            lists = [self._work / f"calls-{rank}" for rank in range(KINDS[name].ranks)]
            for path in lists:
                path.unlink(missing_ok=True)
            faults = [fault(self._case, 1, mode="list") | {"FAILING_CALLS_LOG": str(path)} for path in lists]
            started_s = time.monotonic()
            for done in self._start(name, faults).wait():
                if done.returncode:
                    raise SystemExit(f"{name} fails undisturbed: {done}")
            time_s = time.monotonic() - started_s
            calls = [len(path.read_text().splitlines()) if path.exists() else 0 for path in lists]
            self._expected[name] = outputs(self._case), time_s, calls
        return self._expected[name]

    def _killed(self, name: str, victims: Sequence[int], at: float, *, by_call: bool) -> dict[str, Any]:
        """Run the command, and kill ``victims`` at a time in s or before a call."""
        from faults.failing_calls import fault

        log = self._work / "killed-at"
        log.unlink(missing_ok=True)
        faults: list[dict[str, str]] = [{} for _ in range(KINDS[name].ranks)]
        if by_call:
            faults[victims[0]] = fault(self._case, int(at), mode="kill") | {"FAILING_CALLS_LOG": str(log)}
        running = self._start(name, faults)
        deadline_s = time.monotonic() + (300.0 if by_call else at)
        while time.monotonic() < deadline_s and running.running(victims[0]):
            time.sleep(min(0.005, max(0.0, deadline_s - time.monotonic())))
        for victim in victims:
            if running.running(victim):
                running.send(victim, signal.SIGKILL)
        killed_s = time.monotonic()
        codes = [one.returncode for one in running.wait(timeout_s=2 * LOST_RANK_S)]
        row = {"victims": victims, "codes": codes, "ended_after_s": time.monotonic() - killed_s}
        where = log.read_text().strip().replace(f"{self._case}/", "") if log.exists() else None
        return row | ({"call": int(at), "before": where} if by_call else {"time_s": at})

    def _lost(self, name: str, kill: dict[str, Any]) -> str | None:
        """What went wrong at a kill itself."""
        codes = kill["codes"]
        others = [code for rank, code in enumerate(codes) if rank not in kill["victims"]]
        if -signal.SIGKILL in codes and not set(others) <= {0, 76}:
            return f"the other rank ended with {others}"
        if others and kill["ended_after_s"] > LOST_RANK_S:
            return f"the other rank ended after {kill['ended_after_s']:.0f} s"
        return None if set(codes) <= {0, 73, 76, -signal.SIGKILL} else f"exit codes {codes}"

    def _difference(self, name: str, expected: dict[str, Any]) -> str | None:
        for done in self._start(name, [{}] * KINDS[name].ranks).wait():
            if done.returncode and not (KINDS[name].publishes and done.returncode == 73):
                return f"exit code {done.returncode} again: {done.errors}"
        found = outputs(self._case)
        for file in sorted(expected.keys() | found.keys()):
            if file not in found or file not in expected:
                return f"{file} is {'missing' if file in expected else 'left over'}"
            if found[file] != expected[file]:
                return f"{file} differs: {_first_difference(found[file], expected[file])}"
        return None


def outputs(folder: Path) -> dict[str, Any]:
    """The files below a folder with the hash of their content; rows of metrics.jsonl without times."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if any(f"/{part}" in f"/{name}" for part in UNCOMPARED) or path.is_dir():
            continue
        content = path.read_bytes()
        if path.name == "metrics.jsonl":
            rows = [json.loads(line) for line in content.splitlines()]
            found[name] = [{key: value for key, value in row.items() if key not in TIMES} for row in rows]
        else:
            found[name] = "" if path.name in OWN_CONTENT else hashlib.sha256(content).hexdigest()
    return found


def _first_difference(found: Any, expected: Any) -> str:
    if not isinstance(found, list):
        return f"{found[:8]} is not {expected[:8]}"
    pairs = ((one, other) for one, other in zip(found, expected, strict=False) if one != other)
    one, other = next(pairs, (len(found), len(expected)))
    return f"{one} is not {other}; steps {[row['step'] for row in found]}"


def cases(path: Path) -> Iterator[dict[str, Any]]:
    """The recorded cases."""
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Number of kills and lost results, in all and by kind."""

    def count(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        kills = [kill for row in rows for kill in row["kills"] if -signal.SIGKILL in kill["codes"]]
        waits = [kill["ended_after_s"] for kill in kills if len(kill["victims"]) < len(kill["codes"])]
        return {
            "cases": len(rows),
            "kills": len(kills),
            "before_a_call": sum("call" in kill for kill in kills),
            "lost": [row for row in rows if row["lost"]],
        } | ({"longest_wait_of_the_other_rank_s": max(waits)} if waits else {})

    names = sorted({row["kind"] for row in rows})
    return count(rows) | {"kinds": {name: count([row for row in rows if row["kind"] == name]) for name in names}}


def main() -> int:
    """Run the campaign, and record it with ``--record``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1000, help="number of kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas; a prefix names several")
    parser.add_argument("--work", type=Path, default=Path("build/torture"), help="folder for inputs, outputs and cases")
    parser.add_argument("--pause", type=Path, help="wait while this file exists")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results")
    arguments = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from faults.fork_server import ForkServer

    certified = certificate(sys.argv)
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    wanted = tuple(arguments.kinds.split(","))
    kinds = [name for name in KINDS if name.startswith(wanted)]
    isthmus = ForkServer(work)
    rows = list(cases(work / "cases.jsonl"))
    campaign = Campaign(work, isthmus)
    try:
        while summary(rows)["kills"] < arguments.n:
            while arguments.pause and arguments.pause.exists():
                time.sleep(2)
            row = campaign.run(len(rows), arguments.seed, kinds)
            with (work / "cases.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            rows.append(row)
            if row["lost"]:
                print(json.dumps(row), flush=True)
    finally:
        isthmus.close()
    result = summary(rows)
    print(json.dumps(result | {"kinds": {name: each["kills"] for name, each in result["kinds"].items()}}, indent=1))
    if arguments.record:
        write_result(result_path("torture", certified), {"certificate": certified, **result})
    return 1 if result["lost"] else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
