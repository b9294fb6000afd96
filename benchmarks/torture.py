"""Kills commands at random instants, or lets their system calls fail, and runs them again.

    python benchmarks/torture.py --n 1000 --seed 0 --work /tmp/torture
    python benchmarks/torture.py --fail --n 1000 --work /tmp/torture-fail

Half of the kills are at a random time, half before a random system call that changes a file of the output; some of the
former are SIGTERM. The same command then runs again, and may be killed again. In the end the output has to be that of
an undisturbed run: all files bit by bit, and all rows of metrics.jsonl except for times. A kill of one rank of two also
has to end the other rank.

With --fail the calls of each command that write, create, sync or rename a file fail in turn: once with EIO, once with
ENOSPC, or the disk is full from there on. Of calls with the same name and file, as the writes of the elements of a
tensor, the first and the last one fail. The command has to end with one line and exit code 73 or 74, or to succeed with
its whole output; the same command then runs without a fault.
Cases that are recorded in WORK/cases.jsonl are not run again: the campaign may be interrupted.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import json
import os
import random
import re
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from certificate import REPOSITORY, certificate, result_path, write_result

TESTS = REPOSITORY / "tests"
LOST_RANK_S = 90.0
"""Within this time the other rank has to end."""
JOIN_S = 20
"""How long a rank waits for one that was killed before they met."""
MOST_KILLS = 12
"""In a case."""
TIMES = {"time_s", "tokens_per_s", "tflops_per_device", "mfu", "memory_gib", "step_time_s", "checksum"} | {
    "generation_s", "reward_s", "rollout_s", "generated_tokens_per_s"
}  # fmt: skip
"""Keys of metrics.jsonl that differ between equal runs."""
UNCOMPARED = ("tensorboard/", "trackers.json", "events.jsonl", "environment.json")
"""Of a run folder: interruptions, the state of the machine, and logs of other programs, also of interrupted runs."""
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
        more_settings = ["eval.prompts=[Say the number 4.]", f"parallel.join_timeout_s={JOIN_S}", *more]
        return ["sft", *files, *settings, *more_settings]

    return args


def _grpo(*more: str) -> Callable[[Path], list[str | Path]]:
    settings = (
        "data.seq_length=64 data.valid_fraction=0.1 train.global_batch_size=8 train.steps=6 train.eval_every=2 "
        "optim.lr=1e-3 checkpoint.keep=2 checkpoint.export_final=false rollout.group_size=4 rollout.max_new_tokens=6 "
        "rollout.samples_every=2 grpo.updates_per_rollout=2 grpo.kl_weight=0.1 checkpoint.every=1"
    ).split()

    def args(inputs: Path) -> list[str | Path]:
        files = ["--model", inputs / "model", "--data", inputs / "prompts.jsonl", "--out", "out"]
        reward = f"rollout.reward={inputs / 'rewards.py'}:parity"
        return ["grpo", *files, *settings, reward, f"parallel.join_timeout_s={JOIN_S}", *more]

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
    "train, async": Kind(_train("checkpoint.every=2", "checkpoint.async=true"), weight=3),
    "train, lora": Kind(_train("lora.rank=2", "checkpoint.every=2"), weight=2),
    "train, 2 ranks": Kind(_train("checkpoint.every=2", "parallel.tp=2"), ranks=2, victims=2, weight=3),
    "train, 2 ranks, async": Kind(_train("checkpoint.every=2", "checkpoint.async=true"), ranks=2, victims=2, weight=2),
    "train, 1 rank of 2": Kind(_train("checkpoint.every=3"), ranks=2, weight=3),
    "grpo": Kind(_grpo(), weight=3),
    "grpo, ahead": Kind(_grpo("rollout.ahead=1", "grpo.correction=token"), weight=2),
    "grpo, 2 ranks": Kind(_grpo("parallel.tp=2"), ranks=2, victims=2, weight=2),
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
    prompts = [{"prompt": f"Say the number {number}."} for number in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in prompts))
    (folder / "rewards.py").write_text(
        "def parity(completion_ids, **columns):\n    return [float(sum(ids) % 2) for ids in completion_ids]\n"
    )
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
        self._expected: dict[str, tuple[dict[str, Any], float, list[list[str]]]] = {}
        """By kind: the result, the time in s and the calls by rank of an undisturbed run."""
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
        while len(kills) < MOST_KILLS:
            victims = chance.sample(range(KINDS[name].ranks), KINDS[name].victims)
            number_of_calls = len(calls[victims[0]])
            by_call = chance.random() < 0.5 and number_of_calls > 0
            at = chance.randint(1, number_of_calls) if by_call else chance.uniform(0.0, time_s)
            number = signal.SIGTERM if not by_call and chance.random() < 0.2 else signal.SIGKILL
            kills.append(self._killed(name, victims, at, by_call=by_call, number=number))
            if (lost := self._lost(name, kills[-1])) or chance.random() < 0.25:
                break
        stopped = any(75 in kill["codes"] for kill in kills)
        return row | {"lost": lost or self._again(name, expected, stopped=stopped)}

    def each_call(self, kinds: Sequence[str]) -> list[tuple[str, int, int]]:
        """Kind, rank and number (from 1) of the calls that fail in turn, one of each kind after the other."""
        lists = []
        for name in kinds:
            for rank, calls in enumerate(self._undisturbed(name)[2]):
                last = {call: at for at, call in enumerate(calls, start=1)}
                first = {calls[at - 1]: at for at in range(len(calls), 0, -1)}
                lists.append([(name, rank, at) for at in sorted({*first.values(), *last.values()})])
        return [call for calls in zip_longest(*lists) for call in calls if call is not None]

    def fail(self, number: int, calls: Sequence[tuple[str, int, int]]) -> dict[str, Any]:
        """Let a call fail; ``lost`` of its record is what is wrong, None if nothing is."""
        error, mode = (("EIO", "once"), ("ENOSPC", "once"), ("ENOSPC", "on"))[number % 3]
        return {"case": number} | self._fail(*calls[number], error, mode)

    def fail_at(self, name: str, call: str, error: str) -> dict[str, Any]:
        """Run a command in which the first call fails whose name and path ``call`` matches."""
        calls = self._undisturbed(name)[2][0]
        at = next(number for number, item in enumerate(calls, start=1) if re.fullmatch(call, item))
        return self._fail(name, 0, at, error, "once")

    def kill_at(self, name: str, call: str) -> tuple[list[str], str | None]:
        """Kill a command before the last call that ``call`` matches; returns its files, and what is lost."""
        expected, _, calls = self._undisturbed(name)
        self._clean()
        at = max(number for number, item in enumerate(calls[0], start=1) if re.fullmatch(call, item))
        lost = self._lost(name, self._killed(name, [0], at, by_call=True, number=signal.SIGKILL))
        return list(outputs(self._case)), lost or self._again(name, expected)

    def _fail(self, name: str, rank: int, at: int, error: str, mode: str) -> dict[str, Any]:
        expected, _, calls = self._undisturbed(name)
        self._clean()
        done = self._start(name, {"rank": rank, "n": at, "error": getattr(errno, error), "mode": mode}).wait()
        row = {"kind": name, "rank": rank, "call": at, "failed": calls[rank][at - 1], "mode": mode, "error": error}
        row |= {"codes": [item.returncode for item in done]}
        return row | {"lost": self._failed(name, done, expected) or self._again(name, expected)}

    def _failed(self, name: str, done: Sequence[Any], expected: dict[str, Any]) -> str | None:
        """What is wrong after a failed call."""
        codes, result = {item.returncode for item in done}, outputs(self._case)
        if codes == {0}:
            return difference(result, expected)
        lines = [line for item in done for line in item.errors]
        if not codes <= {73, 74} or len(lines) != 1 or any("Traceback" in item.stderr for item in done):
            return f"exit codes {sorted(codes)}: {[item.stderr[-1500:] for item in done]}"
        # Prepared data is several files, renamed one after the other: what is visible is complete, the rest is kept.
        visible = {file: content for file, content in result.items() if ".partial/" not in file}
        is_kept = len(visible) < len(result)
        if KINDS[name].publishes and visible and not (is_kept and visible.items() <= expected.items()):
            return difference(visible, expected)
        return None

    def _clean(self) -> None:
        shutil.rmtree(self._case, ignore_errors=True)
        (self._case / "out").mkdir(parents=True)
        (self._case / "out").rmdir()

    def _start(self, name: str, fault: dict[str, Any] | None = None) -> Any:
        """Start the ranks; ``fault`` has ``rank`` and arguments of :func:`faults.failing_calls.fault`."""
        from faults.failing_calls import fault as variables_of
        from faults.hosts import rank_variables

        kind, variables = KINDS[name], [{}]
        args = [str(arg) for arg in kind.args(self._inputs)]
        if kind.ranks > 1:
            variables = rank_variables(kind.ranks)
        if fault is not None:
            more = {key: value for key, value in fault.items() if key != "rank"}
            variables[fault["rank"]] |= variables_of(self._case, **more)
        return self._isthmus.start_ranks([[(args, variable) for variable in variables]], cwd=self._case)

    def _undisturbed(self, name: str) -> tuple[dict[str, Any], float, list[list[str]]]:
        if name not in self._expected:
            calls = []
            for rank in range(KINDS[name].ranks):  # one at a time, so that each has a list of its own
                self._clean()
                path = self._work / "calls"
                path.unlink(missing_ok=True)
                started_s = time.monotonic()
                for done in self._start(name, {"rank": rank, "n": 1, "mode": "list", "log": path}).wait():
                    if done.returncode:
                        raise SystemExit(f"{name} fails undisturbed: {done}")
                time_s = time.monotonic() - started_s
                calls.append(path.read_text().replace(f"{self._case}/", "").splitlines() if path.exists() else [])
            self._expected[name] = outputs(self._case), time_s, calls
        return self._expected[name]

    def _killed(
        self, name: str, victims: Sequence[int], at: float, *, by_call: bool, number: signal.Signals
    ) -> dict[str, Any]:
        """Run the command, and send a signal to ``victims`` at a time in s, or kill one before a call."""
        fault = {"mode": "kill", "error": 0} if by_call else None
        running = self._start(name, fault and fault | {"rank": victims[0], "n": int(at)})
        deadline_s = time.monotonic() + (300.0 if by_call else at)
        while time.monotonic() < deadline_s and running.running(victims[0]):
            time.sleep(min(0.005, max(0.0, deadline_s - time.monotonic())))
        for victim in victims:
            if running.running(victim):
                running.send(victim, number)
        killed_s = time.monotonic()
        codes = [item.returncode for item in running.wait(timeout_s=2 * LOST_RANK_S)]
        row = {"victims": victims, "signal": number.name, "codes": codes, "ended_after_s": time.monotonic() - killed_s}
        return row | ({"call": int(at)} if by_call else {"time_s": at})

    def _lost(self, name: str, kill: dict[str, Any]) -> str | None:
        """What went wrong at a kill itself."""
        codes, wait_s = kill["codes"], kill["ended_after_s"]
        if kill["signal"] == "SIGTERM":
            others = {76} if len(kill["victims"]) < len(codes) else set()  # it left before they met
            is_expected = set(codes) <= {0, 73, 75, 130, -signal.SIGTERM} | others
            return None if is_expected and wait_s < LOST_RANK_S else f"exit codes {codes} {wait_s:.0f} s after SIGTERM"
        others = [code for rank, code in enumerate(codes) if rank not in kill["victims"]]
        if -signal.SIGKILL in codes and not set(others) <= {0, 76}:
            return f"the other rank ended with {others}"
        if others and wait_s > LOST_RANK_S:
            return f"the other rank ended after {wait_s:.0f} s"
        return None if set(codes) <= {0, 73, 76, -signal.SIGKILL} else f"exit codes {codes}"

    def _again(self, name: str, expected: dict[str, Any], *, stopped: bool = False) -> str | None:
        """What is wrong when the command runs undisturbed after all; ``stopped`` if it has saved after a SIGTERM."""
        for done in self._start(name).wait():
            if done.returncode and not (KINDS[name].publishes and done.returncode == 73):
                return f"exit code {done.returncode} again: {done.errors}"
        result = outputs(self._case)
        return difference(*(same_checkpoints(result, expected) if stopped else (result, expected)))


def outputs(folder: Path) -> dict[str, Any]:
    """The files below a folder with the hash of their content; rows of metrics.jsonl without times."""
    values: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if any(f"/{part}" in f"/{name}" for part in UNCOMPARED) or path.is_dir():
            continue
        content = path.read_bytes()
        if path.name == "metrics.jsonl":
            rows = [json.loads(line) for line in content.splitlines()]
            values[name] = [{key: value for key, value in row.items() if key not in TIMES} for row in rows]
        else:
            values[name] = "" if path.name in OWN_CONTENT else hashlib.sha256(content).hexdigest()
    return values


def difference(contents: dict[str, Any], expected: dict[str, Any]) -> str | None:
    """The first file that differs."""
    for file in sorted(expected.keys() | contents.keys()):
        if file not in contents or file not in expected:
            return f"{file} is {'missing' if file in expected else 'left over'}"
        item, other = contents[file], expected[file]
        if item != other and isinstance(item, list):
            pairs = (
                (row, expected_values)
                for row, expected_values in zip(item, other, strict=False)
                if row != expected_values
            )
            row, expected_values = next(pairs, (len(item), len(other)))
            return f"{file}: {row} is not {expected_values}; steps {[entry['step'] for entry in item]}"
        if item != other:
            return f"{file} differs"
    return None


def same_checkpoints(first: dict[str, Any], second: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both without the checkpoints that only one has, if they have equally many.

    A stop saves a step more, so that of ``checkpoint.keep`` steps one is another.
    """
    both = [first, second]
    steps = [{name for file in files if (name := _checkpoint(file))} for files in both]
    if len(steps[0]) != len(steps[1]):
        return first, second
    left_out = steps[0] ^ steps[1]
    first, second = ({file: files[file] for file in files if _checkpoint(file) not in left_out} for files in both)
    return first, second


def _checkpoint(file: str) -> str | None:
    result = re.search("/iter_[0-9]+/", file)
    return result and result[0]


def cases(path: Path) -> Iterator[dict[str, Any]]:
    """The recorded cases."""
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Numbers of cases and kills, and what was lost, in all and by kind."""

    def count(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if "failed" in rows[0]:
            by_code = Counter(max(row["codes"]) for row in rows)
            return {"cases": len(rows), "exit_codes": by_code, "lost": [row for row in rows if row["lost"]]}
        kills = [kill for row in rows for kill in row["kills"] if -signal.SIGKILL in kill["codes"]]
        waits = [kill["ended_after_s"] for kill in kills if len(kill["victims"]) < len(kill["codes"])]
        return {
            "cases": len(rows),
            "kills": len(kills),
            "sigterms": sum(kill.get("signal") == "SIGTERM" for row in rows for kill in row["kills"]),
            "before_a_call": sum("call" in kill for kill in kills),
            "lost": [row for row in rows if row["lost"]],
        } | ({"longest_wait_of_the_other_rank_s": max(waits)} if waits else {})

    if not rows:
        return {"cases": 0, "kills": 0}
    names = sorted({row["kind"] for row in rows})
    return count(rows) | {"kinds": {name: count([row for row in rows if row["kind"] == name]) for name in names}}


def main() -> int:
    """Run the campaign, and record it with ``--record``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1000, help="number of kills, or of failed calls at most")
    parser.add_argument("--fail", action="store_true", help="let each call fail in turn instead of killing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS), help="separated by commas; a prefix names several")
    parser.add_argument("--work", type=Path, default=Path("build/torture"), help="folder for inputs, outputs and cases")
    parser.add_argument("--pause", type=Path, help="wait while this file exists")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results")
    arguments = parser.parse_args()
    sys.path[:0] = [str(REPOSITORY / "src"), str(TESTS)]
    from faults.fork_server import ForkServer

    certified = certificate(sys.argv)
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    expected = tuple(arguments.kinds.split(","))
    kinds = [name for name in KINDS if name.startswith(expected)]
    isthmus = ForkServer(work)
    rows = list(cases(work / "cases.jsonl"))
    campaign = Campaign(work, isthmus)
    try:
        calls = campaign.each_call(kinds) if arguments.fail else []
        most = min(arguments.n, len(calls))
        while len(rows) < most if arguments.fail else summary(rows)["kills"] < arguments.n:
            while arguments.pause and arguments.pause.exists():
                time.sleep(2)
            number = len(rows)
            row = campaign.fail(number, calls) if arguments.fail else campaign.run(number, arguments.seed, kinds)
            row["commit"] = certified["commit"]
            with (work / "cases.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            rows.append(row)
            if row["lost"]:
                print(json.dumps(row), flush=True)
    finally:
        isthmus.close()
    result = summary(rows)
    print(json.dumps({name: value for name, value in result.items() if name != "kinds"}, indent=1))
    if arguments.record:
        result |= {"calls": len(calls)} if arguments.fail else {}
        result["commits"] = Counter(row.get("commit") for row in rows)
        name = "failed_calls" if arguments.fail else "torture"
        write_result(result_path(name, certified), {"certificate": certified, **result})
    return 1 if result["lost"] else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
