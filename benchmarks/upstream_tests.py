"""Megatron-LM's own unit tests on a CPU: how many pass, by folder, and why the others do not.

    python benchmarks/upstream_tests.py MEGATRON_LM --record
    python benchmarks/upstream_tests.py MEGATRON_LM --only transformer/moe

MEGATRON_LM is a checkout of the version of the installed megatron-core. Each file runs in a process of its own; tests
that need more ranks run again in 8 processes, the number of GPUs of Megatron-LM's CI. A file that has run is not run
again, so an interrupted command continues (``--again`` starts over). While FILE of ``--wait-while`` exists, no file
is started.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import json
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from certificate import REPOSITORY, certificate, result_path, write_result

sys.path.insert(0, str(REPOSITORY / "tests"))
from upstream.cpu_plugin import prepare
from upstream.forked_ranks import TestFile

Lines = list[dict[str, Any]]
RANKS, OTHER = "ranks", "other"
REASONS = (
    (RANKS, r"is not divisible|divisible by partial DistOpt|(?i:requires? \d+ (gpus|ranks)|world.?size)"),
    ("TransformerEngine", r"(?i:transformer.?engine|fp8|fp4)|Mock object has no|\bTE\b|\btex?\.|\bTE[A-Z]\w+|HAVE_TE"
     r"|\btest_te_|spec_utils.py:49|typed_torch.py:49"),
    ("Apex", r"(?i:\bapex\b|fused_layer_norm_cuda|wgrad_gemm_accum)"),
    ("NVIDIA package", r"(?i:mamba.ssm|causal.conv1d|grouped.gemm|flash.?attn|flashinfer|nvidia.resiliency|modelopt|"
     r"tensorrt|trtllm|nvshmem|deep.?ep\b|hybrid.?ep\b|hadamard|\bfla\b|emerging.optimizers|softmax_cuda)"),
    ("GPU", r"(?i:cuda|triton|nccl|pin(ned)?.memory|memory_stats|no kernel|flex attention|gpu)|DefaultCPUAllocator"
     r"|argument 'index'|_GeneratorContextManager. object is not subscriptable|hybrid_optimizer.py:101"),
    ("gloo", r"ProcessGroupGloo|(?i:gloo)"),
    ("data set", r"/opt/data|no data sets are downloaded|ConnectionError|(?i:couldn't connect|offline mode)"),
    ("package", r"No module named|not installed|(?i:is required)"),
    ("time limit", r"the test took more than|the process ended|the time limit"),
)  # fmt: skip
"""What a test needs, by the text of its skip or failure; the first match counts."""


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("megatron_lm", type=Path)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="run files with TEXT in their path")
    parser.add_argument("--ranks", type=int, default=8, help="for tests that need several (default: %(default)s)")
    parser.add_argument("--limit-s", type=float, default=60, help="for a test (default: %(default)s)")
    parser.add_argument("--file-limit-s", type=float, default=300, help="for a file (default: %(default)s)")
    parser.add_argument("--again", action="store_true", help="run files again that have run")
    parser.add_argument("--count-only", action="store_true", help="run nothing, count what has run")
    parser.add_argument("--wait-while", type=Path, metavar="FILE", help="start no file while FILE exists")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results")
    parser.add_argument("--out", type=Path, help="write the result to this file")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    checkout = options.megatron_lm.resolve()
    certified = certificate([__file__, *arguments])
    root = checkout / "tests" / "unit_tests"
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("test_*.py"))
    names = list(dict.fromkeys(name for text in options.only for name in names if text in name))
    if not names:
        sys.exit(f"{root} has no tests whose path contains {options.only}. Name a checkout of Megatron-LM.")
    if not options.count_only:
        prepare(checkout)
    entries: dict[str, Lines] = {}
    several = 0
    for ranks in sorted({1, options.ranks}):
        for name in names:
            before = entries.get(name, [])
            unclear = [line for line in before if line["outcome"] != "passed" and reason(line) in (RANKS, OTHER)]
            expected = frozenset(line["test"] for line in unclear)
            if ranks > 1 and not expected:
                continue
            lines = run_file(root, name, ranks, expected, options)
            again = {line["test"] for line in lines}
            entries[name] = [*(line for line in before if line["test"] not in again), *lines]
            several += ranks > 1 and bool(lines)
            print(f"{name:<75} {ranks} {dict(Counter(line['outcome'] for line in lines))}", flush=True)
            files = {"run": sum(map(bool, entries.values())), "not_run": sum(not lines for lines in entries.values())}
            files |= {"run_again_with_several_ranks": several}
            result = {"certificate": certified, "megatron_lm": checkout.name, "ranks": options.ranks, "files": files}
            result |= summary(entries)
            if options.out or options.record:
                write_result(options.out or result_path("upstream-tests", certified), result)
    print(json.dumps(result["total"]))


def run_file(root: Path, name: str, ranks: int, selected: frozenset[str], options: argparse.Namespace) -> Lines:
    """Outcomes of the selected tests of a file, or of all."""
    folder = REPOSITORY / "build" / "upstream-tests" / f"{options.megatron_lm.resolve().name}-{ranks}-ranks"
    folder.mkdir(parents=True, exist_ok=True)
    complete = folder / name.replace("/", "__").replace(".py", ".json")
    if options.count_only and not complete.exists():
        return []
    if complete.exists() and not options.again:
        remaining: Lines = json.loads(complete.read_text())
        return remaining
    while options.wait_while is not None and options.wait_while.exists():
        time.sleep(2)
    import_before_fork(root / name)
    tests = TestFile(root / name, options.megatron_lm.resolve(), complete, ranks, options.limit_s)
    lines = tests.run(selected, time.monotonic() + options.file_limit_s)
    complete.write_text(json.dumps(lines, indent=1))
    return lines


def import_before_fork(path: Path) -> None:
    """Import what a file imports once, not in each of its processes; modules of tests depend on the rank."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and node.module and not node.level else []
        for name in names:
            if name.partition(".")[0] != "tests":
                with contextlib.suppress(Exception, SystemExit):  # the test itself skips or fails
                    importlib.import_module(name)


def summary(outcomes: dict[str, Lines]) -> dict[str, Any]:
    """Counts by folder, and the failures without a known reason."""
    folders: dict[str, Counter[str]] = {}
    unexplained: Counter[tuple[str, str, str]] = Counter()
    for name, lines in outcomes.items():
        counts = folders.setdefault(name.rpartition("/")[0] or ".", Counter())
        for line in lines:
            counts[line["outcome"]] += 1
            if line["outcome"] != "passed":
                need = reason(line)
                counts[f"{line['outcome']}: {need}"] += 1
                if line["outcome"] == "failed" and need == OTHER:
                    unexplained[name, " ".join(line.get("reason", "")[:160].split()), line.get("where", "")] += 1
    total = sum(folders.values(), Counter())
    other = [{"file": key[0], "reason": key[1], "where": key[2], "tests": n} for key, n in unexplained.items()]
    return {"total": rows(total), "folders": {name: rows(item) for name, item in folders.items()}, "other": other}


def rows(counts: Counter[str]) -> dict[str, Any]:
    needs = sum(counts[name] for name in counts if ": " in name and not name.endswith(f": {OTHER}"))
    tests = sum(number for name, number in counts.items() if ": " not in name)
    runnable = tests - needs
    if not tests:
        return {"tests": 0}
    share = {"share_passed": counts["passed"] / tests, "share_passed_of_runnable": counts["passed"] / max(runnable, 1)}
    return {"tests": tests, **share, **dict(sorted(counts.items()))}


def reason(line: dict[str, Any]) -> str:
    text = f"{line.get('reason', '')} {line.get('frames', '')}"
    return next((need for need, pattern in REASONS if re.search(pattern, text)), OTHER)


if __name__ == "__main__":
    main(sys.argv[1:])
elif __name__ == "__mp_main__":  # a process that a test has spawned
    prepare(parse(sys.argv[1:]).megatron_lm.resolve())
