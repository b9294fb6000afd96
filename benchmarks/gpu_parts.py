"""Runs the tests of tests/gpu and the GPU benchmarks, part by part: each result is written as soon as it exists.

    make gpu                                          # or: python benchmarks/gpu_parts.py
    make gpu PARTS=tests,llama-1b,layers-8b/isthmus   # all tests, all contestants of one model, one of another
    make gpu LIMIT_S=540                              # starts nothing after that; the next call continues
    make gpu-dry                                      # all parts with tiny models on a CPU

A part that fails does not stop the others; the exit code is 1 then. Finished parts are not repeated. See README.md.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from certificate import REPOSITORY, certificate, cores, result_path, source_sha256, write_result
from gpu_turns.cases import CASES, CONTESTANTS, DESCRIPTION, SEQ_LENGTH, Turn
from gpu_turns.measure import CONVENTION
from gpu_turns.summary import aims, summary
from rounds import run_turn

DRY = {"seq_length": 128, "accumulation": 2, "warmup_steps": 1, "timed_steps": 2, "profiled_steps": 1}
NEEDED = ("torch", "megatron", "transformers", "pydantic", "ruamel", "typer", "pytest")
SAMPLES = 2000
"""Chats of the chats case."""


def part_names() -> list[str]:
    """All parts in the order in which they run: tests first, since a wrong result makes a fast one worthless."""
    tests = sorted((REPOSITORY / "tests" / "gpu").glob("test_*.py"))
    models = [f"{case}/{name}" for case, item in CASES.items() for name in item.contestants]
    return [*(f"tests/{path.stem}" for path in tests), *models, "moe-layer"]


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", help="parts or their first names, with commas (default: all; see --list)")
    parser.add_argument("--list", action="store_true", help="list the parts")
    parser.add_argument("--out", type=Path, help="default: build/gpu; with --dry build/gpu-dry")
    parser.add_argument("--work", type=Path, help="for model folders, about 15 GB (default: OUT-models)")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="end within this time")
    parser.add_argument("--again", action="store_true", help="repeat parts that are done")
    parser.add_argument("--dry", action="store_true", help="tiny models on a CPU, to check that all of it runs")
    parser.add_argument("--record", action="store_true", help="also write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    names = part_names()
    expected = chosen.parts.split(",") if chosen.parts else names
    if unknown := [item for item in expected if not any(_selects(item, name) for name in names)]:
        parser.error(f"not known: {', '.join(unknown)}. --list shows the parts")
    if chosen.record and chosen.dry:
        parser.error("--dry is not a measurement and is not recorded")
    chosen.names = [name for name in names if any(_selects(item, name) for item in expected)]
    chosen.out = (chosen.out or REPOSITORY / "build" / ("gpu-dry" if chosen.dry else "gpu")).resolve()
    chosen.work = (chosen.work or chosen.out.with_name(f"{chosen.out.name}-models")).resolve()
    return chosen


def _selects(selection: str, name: str) -> bool:
    return name == selection or name.startswith(f"{selection}/")


def call(module: str, spec: dict[str, Any], *, dry: bool, timeout_s: float) -> dict[str, Any]:
    """The result of a module's ``run``: in a process of its own, in a dry run in this one."""
    if dry or module == "gpu_turns.tests_turn":
        run: Callable[[dict[str, Any]], dict[str, Any]] = importlib.import_module(module).run
        return run(spec | ({"timeout_s": timeout_s} if module == "gpu_turns.tests_turn" else {}))
    return run_turn(module, spec, threads=max(1, cores() // 2), timeout_s=timeout_s)


def run_part(name: str, chosen: argparse.Namespace, result: dict[str, Any], deadline_s: float) -> dict[str, Any]:
    """Run one part and return its result; ``deadline_s`` is a monotonic time."""
    platform = "cpu" if chosen.dry else "auto"

    def run(module: str, spec: dict[str, Any]) -> dict[str, Any]:
        timeout_s = min(3600.0, max(1.0, deadline_s - time.monotonic()))
        return call(module, spec, dry=chosen.dry, timeout_s=timeout_s)

    case, _, second = name.partition("/")
    if case == "tests":
        file = REPOSITORY / "tests" / "gpu" / f"{second}.py"
        return run("gpu_turns.tests_turn", {"file": str(file), "log": str(chosen.out / "tests.txt")})
    if case == "moe-layer":
        return run("gpu_turns.moe_layer_turn", {"platform": platform, "dry": chosen.dry})
    folder = chosen.work / f"{'tiny-' if chosen.dry else ''}{case}"
    folder.mkdir(parents=True, exist_ok=True)
    lengths = DRY if chosen.dry else {}
    module, differs = CONTESTANTS[second]
    turn: dict[str, Any] = {"folder": str(folder), "platform": platform, "chats": CASES[case].chats, "dry": chosen.dry}
    device = "cpu" if chosen.dry else "cuda"
    spec = {"case": case, "folder": str(folder), "device": device, "dry": chosen.dry}
    spec |= {"samples": 40 if chosen.dry else SAMPLES, "seq_length": lengths.get("seq_length", SEQ_LENGTH)}
    described = folder / DESCRIPTION  # read here: a process takes seconds to find it
    result["models"][case] = (
        json.loads(described.read_text()) if described.exists() else run("gpu_turns.model_folder", spec)
    )
    return run(module, Turn(started_s=time.time(), **turn, **lengths, **differs).spec())


def open_result(chosen: argparse.Namespace, arguments: list[str]) -> dict[str, Any]:
    """The result so far, or a new one; refuses a machine without a GPU, and a result of another source or device."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        _refuse(
            f"{sys.executable} has no {', '.join(missing)}. Collect wheels on a machine with network (make gpu-wheels) "
            "or name another Python (make gpu GPU_PYTHON=...)."
        )
    platform = "cpu" if chosen.dry else "auto"
    device = call("gpu_turns.device", {"platform": platform}, dry=chosen.dry, timeout_s=300.0)
    if why := device.get("refused"):
        _refuse(
            f"no GPU: {why}. On a machine with a GPU: make gpu. To check on a CPU that all parts run: make gpu-dry."
        )
    certified = certificate(["benchmarks/gpu_parts.py", *arguments])
    certified |= {"source_sha256": source_sha256()} | device
    path = chosen.out / "results.json"
    if not path.exists():
        new = {"benchmark": "gpu", "certificate": certified, "dry": chosen.dry, "convention": CONVENTION}
        return new | {"models": {}, "parts": {}, "aims": []}
    result: dict[str, Any] = json.loads(path.read_text())
    before = result["certificate"]
    for name in ("source_sha256", "device"):
        if before[name] != certified[name]:
            _refuse(
                f"{path} is of another {name}: {before[name]}, this is {certified[name]}. Remove it, or give another "
                "--out."
            )
    return result


def _refuse(text: str) -> None:
    print(f"gpu_parts.py: {text}", file=sys.stderr)
    raise SystemExit(2)


def save(result: dict[str, Any], out: Path) -> None:
    """Write results.json and summary.md."""
    result["aims"] = aims(result["parts"])
    write_result(out / "results.json", result)
    (out / "summary.md").write_text(summary(result), encoding="utf-8")


def state_of(outcome: dict[str, Any]) -> str:
    """``done``, ``absent`` (a contestant's package is not installed) or ``failed``."""
    return "absent" if "absent" in outcome else "failed" if outcome.get("failed") or "error" in outcome else "done"


def main(arguments: list[str]) -> int:
    chosen = parse(arguments)
    if chosen.list:
        print("\n".join(part_names()))
        return 0
    started_s = time.monotonic()
    deadline_s = started_s + chosen.limit_s
    result = open_result(chosen, arguments)
    chosen.out.mkdir(parents=True, exist_ok=True)
    parts = result["parts"]
    for name in chosen.names:
        if parts.get(name, {}).get("state") == "done" and not chosen.again:
            print(f"{name:<36} done before", flush=True)
            continue
        if time.monotonic() >= deadline_s:
            print(f"{name:<36} not started: --limit-s {chosen.limit_s:g} is over; the same command continues")
            continue
        part_s = time.monotonic()
        try:
            outcome = run_part(name, chosen, result, deadline_s)
        except (Exception, SystemExit) as error:  # any failure of a part; the others still run
            outcome = {"error": f"{type(error).__name__}: {error}"}
        parts[name] = {"state": state_of(outcome), "seconds": time.monotonic() - part_s, **outcome}
        save(result, chosen.out)
        print(f"{name:<36} {parts[name]['state']} in {parts[name]['seconds']:.0f} s{_line(outcome)}", flush=True)
    save(result, chosen.out)
    if chosen.dry:
        shutil.rmtree(chosen.work, ignore_errors=True)
    if chosen.record:
        path = result_path("gpu", result["certificate"])
        write_result(path, result)
        print(f"written to {path}")
    print(f"\n{(chosen.out / 'summary.md').read_text()}\nwritten to {chosen.out}")
    return 0 if all(parts.get(name, {}).get("state") in ("done", "absent") for name in chosen.names) else 1


def _line(outcome: dict[str, Any]) -> str:
    if "tokens_per_s" in outcome:
        mfu = "" if outcome["mfu"] is None else f", MFU {outcome['mfu']:.1%}"
        return f": {outcome['tokens_per_s']:,.0f} tokens/s{mfu}"
    if "passed" in outcome:
        return f": {outcome['passed']} passed, {len(outcome['failed'])} failed, {len(outcome['skipped'])} skipped"
    why = outcome.get("absent") or outcome.get("error")
    return "" if why is None else f": {why[-300:]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
