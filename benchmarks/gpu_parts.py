"""Runs the tests of tests/gpu and the GPU benchmarks, part by part; each measurement is written as soon as it exists.

    make gpu                                          # or: python benchmarks/gpu_parts.py
    make gpu-quick                                    # the parts with the most answers, in at most 9 minutes
    make gpu PARTS=tests,llama-1b,layers-8b/isthmus   # all tests, all contestants of one model, one of another
    make gpu LIMIT_S=1500                             # ends within that time; the next call continues
    make gpu FRESH=1                                  # starts anew
    make gpu-dry                                      # all parts with tiny models on a CPU

A part that fails does not stop the others; the exit code is 1 then. Finished parts are not repeated. See README.md.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from certificate import REPOSITORY, certificate, cores, result_path, source_sha256, write_result
from gpu_turns.cases import CASES, CONTESTANTS, DESCRIPTION, Turn
from gpu_turns.measure import CONVENTION, speed
from gpu_turns.parts import GROUPS, PARTS, Part
from gpu_turns.rows import Row, of_kind, read
from gpu_turns.summary import aims, summary
from gpu_turns.turn import kill, start

QUICK_S = 540.0
RESERVE_S = 5.0
"""Of the limit, for the summary."""
DRY: dict[str, Any] = {"seq_length": 64, "accumulation": 2, "profiled_steps": 1}
DRY_STEPS = 20
"""Timed steps of the case with 200, at most."""
MODULES = {
    "probes": "probes_turn", "kernels": "kernels_turn", "bandwidth": "bandwidth_turn", "sanitizer": "sanitizer_turn",
    "moe-layer": "moe_layer_turn", "saves": "saves_turn",
    "generation": "generation_turn", "export": "export_turn", "grpo": "grpo_turn",
}  # fmt: skip
"""Group -> its module, of those that are neither tests nor contestants."""
MODELS_OF = {"saves": "qwen-0.6b", "generation": "llama-8b", "export": "llama-8b"}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", help="parts or groups, with commas (default: all; see --list)")
    parser.add_argument("--list", action="store_true", help="list the parts")
    parser.add_argument("--quick", action="store_true", help=f"few parts, in at most {QUICK_S:g} s")
    parser.add_argument("--out", type=Path, help="default: build/gpu; with --dry build/gpu-dry")
    parser.add_argument("--work", type=Path, help="for model folders, about 60 GB (default: build/gpu-models)")
    parser.add_argument("--limit-s", type=float, default=math.inf, help="end within this time")
    parser.add_argument("--fresh", action="store_true", help="repeat parts that are done")
    parser.add_argument("--dry", action="store_true", help="tiny models on a CPU, to check that all of it runs")
    parser.add_argument("--record", action="store_true", help="also write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    expected = chosen.parts.split(",") if chosen.parts else [group.name for group in GROUPS]
    if unknown := [item for item in expected if not any(part.selected(item) for part in PARTS)]:
        parser.error(f"not known: {', '.join(unknown)}. --list shows the parts")
    if chosen.record and chosen.dry:
        parser.error("--dry is not a measurement and is not recorded")
    selected = [part for part in PARTS if any(part.selected(item) for item in expected)]
    chosen.selected = [part for part in selected if part.quick or not chosen.quick]
    if chosen.quick:
        chosen.limit_s = min(chosen.limit_s, QUICK_S)
    chosen.out = (chosen.out or REPOSITORY / "build" / ("gpu-dry" if chosen.dry else "gpu")).resolve()
    models = chosen.out.with_name(f"{chosen.out.name}-models") if chosen.dry else REPOSITORY / "build" / "gpu-models"
    chosen.work = (chosen.work or models).resolve()
    return chosen


class Run:
    """The parts of one call, and the result that they share with earlier calls."""

    def __init__(self, chosen: argparse.Namespace, arguments: list[str]) -> None:
        """Refuses a machine without a GPU, and a result of another source or device."""
        self.chosen, self.deadline_s = chosen, time.monotonic() + chosen.limit_s - RESERVE_S
        self.sensors: Any = None
        if chosen.fresh:
            shutil.rmtree(chosen.out, ignore_errors=True)
        for folder in (chosen.out / "rows", chosen.work):
            folder.mkdir(parents=True, exist_ok=True)
        self.result = self._open_result(certificate(["benchmarks/gpu_parts.py", *arguments]))

    def remaining_s(self) -> float:
        """Until the limit."""
        return self.deadline_s - time.monotonic()

    def _open_result(self, certified: dict[str, Any]) -> dict[str, Any]:
        device = self._process("gpu_turns.device", {"platform": self.platform}, "device", fresh=True)
        facts: dict[str, Any] = next(iter(of_kind(device["rows"], "fact")), {})
        facts = {name: value for name, value in facts.items() if name not in ("kind", "at_s")}
        if why := facts.get("refused") or _why(device):
            _refuse(f"no GPU: {why}. On a machine with a GPU: make gpu. To check on a CPU that it runs: make gpu-dry.")
        if not self.chosen.dry:
            from isthmus.platforms.gpu_sensors import amd_sensors, nvidia_sensors

            pci, uuid = facts.pop("pci"), facts.pop("uuid")  # of one GPU in the world: not for a record
            self.sensors = amd_sensors(pci) if facts["hip"] else nvidia_sensors(pci, uuid)
        certified |= {"source_sha256": source_sha256(), **facts}
        path = self.chosen.out / "results.json"
        if not path.exists():
            new = {"benchmark": "gpu", "certificate": certified, "dry": self.chosen.dry, "convention": CONVENTION}
            return new | {"models": {}, "parts": {}, "aims": []}
        result: dict[str, Any] = json.loads(path.read_text())
        for name in ("source_sha256", "device"):
            if result["certificate"][name] != certified[name]:
                _refuse(
                    f"{path} is of another {name}: {result['certificate'][name]}, this is {certified[name]}. Start "
                    "anew with --fresh (make gpu FRESH=1), or give another --out."
                )
        return result

    @property
    def platform(self) -> str:
        return "cpu" if self.chosen.dry else "auto"

    def run(self, part: Part) -> None:
        """Run a part, unless it is done or does not fit into the remaining time."""
        parts, needed_s = self.result["parts"], 1.0 if self.chosen.dry else float(part.group.seconds)
        if parts.get(part.name, {}).get("state") == "done":
            print(f"{part.name:<36} done before", flush=True)
            return
        if (remaining_s := self.remaining_s()) < needed_s:
            left = f"left out: it takes about {needed_s:.0f} s, {max(0.0, remaining_s):.0f} s remained"
            parts.setdefault(part.name, {"state": "left out", "why": left, "rows": []})
            self.save()
            print(f"{part.name:<36} {left}; the same command continues", flush=True)
            return
        result = None
        for name, module, spec in self._processes(part):
            own = part if name == part.name else None
            result = self._process(module, spec, name, fresh=part.group.name != "tests", part=own)
            if result["state"] != "done":
                break
        assert result is not None
        parts[part.name] = result
        self.save()
        print(f"{part.name:<36} {result['state']} in {result['seconds']:.0f} s{_line(result)}", flush=True)

    def _processes(self, part: Part) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Name, module and spec of what makes the model of a part, where it has one, and of the part."""
        chosen, group, dry = self.chosen, part.group.name, self.chosen.dry
        case = CASES.get(group)
        model = case.model if case else MODELS_OF.get(group)
        tiny = "tiny-" if dry else ""
        weights = str(chosen.work / f"{tiny}{model}")
        spec: dict[str, Any] = {"platform": self.platform, "dry": dry, "contestant": part.turn, "weights": weights}
        spec |= {"folder": str(chosen.work), "log": str(chosen.out / "tests.txt")}
        turn = None
        if case is not None:
            settings = {"chats": case.chats, "settings": dict(case.settings), "needs": case.needs}
            sizes = {"seq_length": case.seq_length, "accumulation": case.accumulation, "timed_steps": case.timed_steps}
            sizes |= DRY | {"timed_steps": min(case.timed_steps, DRY_STEPS)} if dry else {}
            if case.timed_steps > 100:
                sizes["profiled_steps"] = 0
            fields = {"weights": weights, "tokens": str(chosen.out / "tokens" / group), "dry": dry}
            fields |= {"platform": self.platform} | sizes | settings
            module, differs = CONTESTANTS[part.turn]
            turn = asdict(Turn(**fields | differs))
        if model is not None:
            # A turn has the tokens of all: its platform and precision are not part of them.
            tokens = None if turn is None else turn | {"platform": "cpu", "precision": "fp32", "settings": {}}
            make = {"model": model, "weights": weights, "turn": tokens, "dry": dry, "device": "cpu" if dry else "cuda"}
            folders = [weights, *([] if turn is None else [turn["tokens"]])]
            if not all(Path(folder, DESCRIPTION).exists() for folder in folders):
                yield f"{group}-model", "gpu_turns.workload", make
            self.result["models"][model] = json.loads(Path(weights, DESCRIPTION).read_text())
        if turn is not None:
            yield part.name, module, turn
        elif group == "tests":
            file = REPOSITORY / "tests" / "gpu" / f"test_{part.turn}.py"
            yield part.name, "gpu_turns.tests_turn", {"file": str(file), "log": str(chosen.out / "tests.txt")}
        else:
            yield part.name, f"gpu_turns.{MODULES[group]}", spec

    def _process(
        self, module: str, spec: dict[str, Any], name: str, *, fresh: bool, part: Part | None = None
    ) -> dict[str, Any]:
        """Run a process to its end or to the limit; the result so far is saved while it runs."""
        path = self.chosen.out / "rows" / f"{name.replace('/', '-')}.jsonl"
        if fresh:
            path.unlink(missing_ok=True)
        before, since_s, started_s = len(read(path)), time.time(), time.monotonic()
        result: dict[str, Any] = {"state": "running", "seconds": 0.0, "rows": []}
        result["sensors"] = []
        log = self.chosen.out / "log.txt"
        process = start(module, spec, path, threads=max(1, cores() // 2), log=log, fork=self.chosen.dry)
        saved_rows = -1
        try:
            while process.is_alive() and self.remaining_s() > 0:
                process.join(min(0.5, max(0.01, self.remaining_s())))
                result |= {"rows": read(path, since_s=since_s), "seconds": time.monotonic() - started_s}
                if self.sensors is not None:
                    reading = asdict(self.sensors.read())
                    result["sensors"].append({key: None if value != value else value for key, value in reading.items()})
                if part is not None and len(result["rows"]) != saved_rows:
                    saved_rows = len(result["rows"])
                    self.result["parts"][part.name] = result
                    self.save()
        finally:
            cut = process.is_alive()
            result["state"] = "cut" if cut else result["state"]  # also of a part that a signal ends
            kill(process)
        result |= {"rows": read(path, since_s=since_s), "seconds": time.monotonic() - started_s}
        result["state"] = _state(result["rows"][before:], process.exitcode, cut=cut)
        if result["state"] == "done" and any(row["outcome"] == "failed" for row in last_outcomes(result)):
            result["state"] = "failed"
        return result

    def save(self) -> None:
        """Write results.json and summary.md."""
        self.result["aims"] = aims(self.result["parts"])
        write_result(self.chosen.out / "results.json", self.result)
        staged = self.chosen.out / ".tmp-summary.md"
        staged.write_text(summary(self.result), encoding="utf-8")
        staged.replace(self.chosen.out / "summary.md")


def last_outcomes(result: dict[str, Any]) -> list[Row]:
    """The last row of each test."""
    return list({row["name"]: row for row in of_kind(result["rows"], "test")}.values())


def _state(rows: list[Row], code: int | None, *, cut: bool) -> str:
    """``done``, ``absent`` (its package is not installed), ``cut`` (by the time limit) or ``failed``."""
    if cut:
        return "cut"
    if of_kind(rows, "absent"):
        return "absent"
    return "failed" if code or of_kind(rows, "error") else "done"


def _why(result: dict[str, Any]) -> str:
    reasons = [row["why"] for kind in ("absent", "error") for row in of_kind(result["rows"], kind)]
    return str(reasons[-1][-300:]) if reasons else "" if result["state"] in ("done", "cut") else "its process died"


def _line(result: dict[str, Any]) -> str:
    if (fast := speed(result)) is not None:
        mfu = "" if fast["mfu"] is None else f", MFU {fast['mfu']:.1%}"
        return f": {fast['tokens_per_s']:,.0f} tokens/s{mfu}"
    if outcomes := [row["outcome"] for row in last_outcomes(result)]:
        return ": " + ", ".join(f"{outcomes.count(kind)} {kind}" for kind in ("passed", "failed", "skipped"))
    why = _why(result)
    return f": {why}" if why else ""


def _refuse(text: str) -> None:
    print(f"gpu_parts.py: {text}", file=sys.stderr)
    raise SystemExit(2)


@contextmanager
def _terminated_as_exit() -> Iterator[None]:
    """SIGTERM ends the run as an exception does: the process at hand is killed, and what it measured is saved."""

    def end(*_: Any) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: list[str]) -> int:
    chosen = parse(arguments)
    if chosen.list:
        for group in GROUPS:
            print(f"{group.name:<12}{group.about}: {', '.join(group.turns)}")
        return 0
    if chosen.dry:  # once for all forks
        import torch  # noqa: F401
        import transformers  # noqa: F401

        import isthmus.recipes.run  # noqa: F401
    with _terminated_as_exit():
        run = Run(chosen, arguments)
        try:
            for part in chosen.selected:
                run.run(part)
        finally:
            run.save()
    if chosen.dry:
        shutil.rmtree(chosen.work, ignore_errors=True)
    if chosen.record:
        path = result_path("gpu", run.result["certificate"])
        write_result(path, run.result)
        print(f"written to {path}")
    print(f"\n{(chosen.out / 'summary.md').read_text()}\nwritten to {chosen.out}")
    states = [run.result["parts"][part.name]["state"] for part in chosen.selected]
    return 0 if all(state in ("done", "absent") for state in states) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
