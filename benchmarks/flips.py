"""Damages files that Isthmus wrote, and runs the commands that read them: an error has to name the file.

    python benchmarks/flips.py --n 1000 --seed 0 --work /tmp/flips

Each case copies an output (an export, a checkpoint, prepared data, a run folder), damages one place of one of its files
(a flipped bit, zeros, or a cut), and runs a command that reads it. It is silent damage if the command succeeds with
another result than that of the undamaged copy, without a warning that names the file. Cases that are recorded in
WORK/cases.jsonl are not run again; each has the commit that it ran on.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from certificate import certificate, result_path, write_result
from torture import TESTS, cases, outputs

REFUSED = (65, 66, 77)
"""Exit codes for damaged, missing and unsafe input."""
_TRAIN = ("data.seq_length=64", "train.global_batch_size=4", "optim.lr=1e-3")


@dataclass(frozen=True, slots=True)
class Reader:
    """A command in a folder with the copy ``in``, and what is compared if it succeeds."""

    source: str
    """The output that is damaged, a name below the inputs."""
    args: Sequence[str]
    """``{inputs}`` is the folder with the inputs."""
    weight: int = 1
    compared: str = "out"
    copied_to: str = "in"


READERS = {
    "convert hf": Reader("hf", ["convert", "in", "out", "--to", "hf"], 3),
    "convert hf to torch_dist": Reader("hf", ["convert", "in", "out"], 1),
    "convert torch_dist": Reader("torch_dist", ["convert", "in", "out"], 3),
    "convert legacy": Reader("legacy", ["convert", "in", "out"], 3),
    "convert checkpoint": Reader("run/checkpoints", ["convert", "in", "out"], 3),
    "verify hf": Reader("hf", ["verify", "{inputs}/model", "in"]),
    "verify torch_dist": Reader("torch_dist", ["verify", "{inputs}/model", "in"]),
    "verify legacy": Reader("legacy", ["verify", "{inputs}/model", "in"]),
    "merge": Reader("adapter", ["merge", "{inputs}/model", "in", "out"]),
    "train from hf": Reader(
        "hf", ["sft", "--model", "in", "--data", "{inputs}/chats.json", "--out", "out", "train.steps=1", *_TRAIN], 3
    ),
    "train on prepared data": Reader(
        "prepared",
        ["sft", "--model", "{inputs}/model", "--data", "in/data", "--out", "out", "train.steps=2", *_TRAIN],
        3,
    ),
    "resume": Reader(
        "run",
        ["sft", "--model", "{inputs}/model", "--data", "{inputs}/chats.json", "--out", "out", "train.steps=4", *_TRAIN],
        4,
        copied_to="out",
    ),
}


def make_inputs(folder: Path, isthmus: Any) -> None:
    """A tiny model, and an output of each kind."""
    from faults.conftest import CHATS, tiny_qwen3

    folder.mkdir(parents=True)
    tiny_qwen3(folder / "model")
    (folder / "chats.json").write_text(json.dumps(CHATS))
    train = ["sft", "--model", "model", "--data", "chats.json", *_TRAIN]
    for command in (
        ["convert", "model", "hf", "--to", "hf"],
        ["convert", "model", "torch_dist"],
        ["convert", "model", "legacy", "--to", "torch", "--tp", "2"],
        ["prepare", "chats.json", "prepared/data", "--tokenizer", "model", "--kind", "chat", "--workers", "1"],
        [*train, "--out", "run", "train.steps=2"],
        [*train, "--out", "lora", "train.steps=1", "lora.rank=2"],
    ):
        if (done := isthmus(*command, cwd=folder)).returncode:
            raise SystemExit(f"{command}: {done}")
    (folder / "lora" / "adapter").rename(folder / "adapter")
    shutil.rmtree(folder / "lora")


def damage(path: Path, chance: random.Random) -> str:
    """Change one place of a file; returns what was changed."""
    content = bytearray(path.read_bytes())
    at, kind = chance.randrange(len(content)), chance.choice(("flip", "flip", "zero", "cut"))
    if kind == "flip":
        bit = chance.randrange(8)
        content[at] ^= 1 << bit
        what = f"bit {bit} of byte {at}"
    elif kind == "cut":
        del content[at:]
        what = f"cut at {at}"
    else:
        length = min(len(content) - at, chance.choice((1, 8, 512, 4096)))
        content[at : at + length] = bytes(length)
        what = f"{length} zeros at {at}"
    if bytes(content) == path.read_bytes():
        return ""
    path.write_bytes(content)
    return what


class Campaign:
    """Runs cases one after the other in a folder."""

    def __init__(self, work: Path, isthmus: Any) -> None:
        """``isthmus`` is the fork server."""
        self._case, self._inputs, self._isthmus = work / "case", work / "inputs", isthmus
        self._expected: dict[str, dict[str, Any]] = {}
        if not self._inputs.exists():
            make_inputs(self._inputs, isthmus)

    def run(self, number: int, seed: int, names: Sequence[str]) -> dict[str, Any]:
        chance = random.Random(f"{seed} {number}")
        name = chance.choices(names, [READERS[item].weight for item in names])[0]
        if name not in self._expected:
            copy = self._copy(READERS[name])
            if (done := self._read(READERS[name])).returncode:
                raise SystemExit(f"{name} fails undamaged: {done}")
            self._expected[name] = self._result(READERS[name])
        reader, what = READERS[name], ""
        while not what:
            copy = self._copy(reader)
            files = sorted(path for path in copy.rglob("*") if path.is_file() and path.stat().st_size)
            path = chance.choice(files)
            what = damage(path, chance)
        started_s = time.monotonic()
        done = self._read(reader)
        file = str(path.relative_to(copy))
        row = {"case": number, "seed": seed, "reader": name, "file": file, "damage": what, "code": done.returncode}
        row["time_s"] = round(time.monotonic() - started_s, 2)
        return row | self._outcome(reader, name, path, done)

    def _outcome(self, reader: Reader, name: str, path: Path, done: Any) -> dict[str, Any]:
        if done.returncode == 0:
            result, expected = self._result(reader), self._expected[name]
            # The damaged file itself, which the command leaves as it is, is no result.
            damaged_file = str(path.relative_to(self._case)) if reader.copied_to == reader.compared else ""
            changed = [key for key in expected.keys() | result.keys() if expected.get(key) != result.get(key)]
            changed = sorted(key for key in changed if f"{reader.compared}/{key}" != damaged_file)
            warned = any("warning: " in line and path.name in line for line in done.stderr.splitlines())
            return {"outcome": "harmless" if not changed else "warned" if warned else "silent", "changed": changed[:3]}
        line = done.errors[0] if done.errors else done.stderr[-300:]
        refused = done.returncode in (*REFUSED, 1) if name.startswith("verify") else done.returncode in REFUSED
        names_file = path.name in line or path.parent.name in line
        return {"outcome": "refused" if refused else "other error", "named": names_file, "error": line[:300]}

    def _copy(self, reader: Reader) -> Path:
        shutil.rmtree(self._case, ignore_errors=True)
        return Path(shutil.copytree(self._inputs / reader.source, self._case / reader.copied_to))

    def _read(self, reader: Reader) -> Any:
        args = [arg.format(inputs=self._inputs) for arg in reader.args]
        return self._isthmus(*args, cwd=self._case)

    def _result(self, reader: Reader) -> dict[str, Any]:
        return outputs(self._case / reader.compared)


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Counts of outcomes, in all and by reader, and the cases that fail."""

    def count(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        refused = [row for row in rows if row["outcome"] == "refused"]
        return {
            "cases": len(rows),
            **{outcome: 0 for outcome in ("refused", "warned", "harmless", "silent", "other error")},
            **Counter(row["outcome"] for row in rows),
            "refused_without_the_name": sum(not row["named"] for row in refused),
        }

    failed = [row for row in rows if row["outcome"] in ("silent", "other error")]
    commits = Counter(row["commit"] for row in rows)
    names = sorted({row["reader"] for row in rows})
    readers = {name: count([row for row in rows if row["reader"] == name]) for name in names}
    return count(rows) | {"failed": failed, "readers": readers, "commits": commits}


def main() -> int:
    """Run the campaign, and record it with ``--record``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1000, help="number of damaged places")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--readers", default=",".join(READERS), help="separated by commas; a prefix names several")
    parser.add_argument("--work", type=Path, default=Path("build/flips"), help="folder for inputs, outputs and cases")
    parser.add_argument("--pause", type=Path, help="wait while this file exists")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results")
    arguments = parser.parse_args()
    sys.path.insert(0, str(TESTS))
    from faults.fork_server import ForkServer

    certified = certificate(sys.argv)
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    expected = tuple(arguments.readers.split(","))
    names = [name for name in READERS if name.startswith(expected)]
    isthmus = ForkServer(work)
    rows = list(cases(work / "cases.jsonl"))
    campaign = Campaign(work, isthmus)
    try:
        while len(rows) < arguments.n:
            while arguments.pause and arguments.pause.exists():
                time.sleep(2)
            rows.append(campaign.run(len(rows), arguments.seed, names) | {"commit": certified["commit"]})
            with (work / "cases.jsonl").open("a") as file:
                file.write(json.dumps(rows[-1]) + "\n")
            if rows[-1]["outcome"] in ("silent", "other error"):
                print(json.dumps(rows[-1]), flush=True)
    finally:
        isthmus.close()
    result = summary(rows)
    print(json.dumps(result, indent=1))
    if arguments.record:
        write_result(result_path("flips", certified), {"certificate": certified, **result})
    return 1 if result["failed"] else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
