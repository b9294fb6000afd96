"""Damaged and hostile files for every reader: each is read, or refused with a message, in bounded time and memory.

python benchmarks/fuzz.py --n 1000000 --state fuzz-state.json --record

The inputs are functions of seed, reader and number. A reader runs in a process with limited memory, which is ended when
one input takes 5 seconds; the campaign continues with the next input, and with --state after an interruption.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from mmap import mmap
from pathlib import Path
from typing import Any

from certificate import REPOSITORY, certificate, publish_result, write_result

sys.path[:0] = [str(REPOSITORY / name) for name in ("src", "tests")]
os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}

LIMIT_S = 5.0
_HANG_S = 60.0
"""Without using the processor, as when a file is opened that nobody writes."""
MEMORY_BYTES = 1 << 30
"""Address space that one process may take for its inputs."""
_PROGRESS = struct.Struct("<qqq")
"""Number of the current input, and how many before it were read and refused."""
BATCH_S = 15.0
"""Longest time between two states."""


def work(reader: Any, start: int, stop: int, campaign: int, progress: Path) -> None:
    """Run the inputs of a batch in this process; the parent reads the number of the current one from ``progress``."""
    from hostile.contract import Finding, attempt

    folder = progress.with_name("seed")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(reader.seed, folder)
    reader.read(folder / reader.file.partition("/")[2])  # the valid file; imports what it needs
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    counts, until = {"read": 0, "refused": 0}, time.monotonic() + BATCH_S
    with progress.open("r+b") as file, mmap(file.fileno(), _PROGRESS.size) as shared:
        for number in range(start, stop):
            if time.monotonic() > until:
                break
            shared[:] = _PROGRESS.pack(number, *counts.values())
            content = reader.content(number, campaign)
            try:
                counts[attempt(reader, content, folder)] += 1
            except Finding as finding:
                print(json.dumps({"number": number, "what": str(finding)}), flush=True)
        shared[:] = _PROGRESS.pack(number, *counts.values())


class Batch:
    """A forked process that works on a batch, and the limits of time of each input."""

    def __init__(self, reader: Any, start: int, stop: int, campaign: int, scratch: Path) -> None:
        self._progress, self._start = scratch / "progress", start
        self._progress.write_bytes(_PROGRESS.pack(-1, 0, 0))
        self._output, self._errors = scratch / "output", scratch / "errors"
        self._pid = os.fork()
        if not self._pid:
            code = 1
            try:
                for number, file in ((1, self._output), (2, self._errors)):
                    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
                work(reader, start, stop, campaign, self._progress)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)

    def run(self) -> tuple[int, dict[str, int], list[dict[str, Any]]]:
        """Wait for the process; returns the inputs that ran, counts by outcome, and findings."""
        ended = self._wait()
        at, *counts = _PROGRESS.unpack(self._progress.read_bytes())
        findings = [json.loads(line) for line in self._output.read_text().splitlines() if line.startswith('{"number"')]
        outcomes = dict(zip(("read", "refused"), counts, strict=True))
        if ended is None:
            return sum(counts) + len(findings), outcomes, findings
        errors = self._errors.read_text(errors="replace")
        if at < 0:
            raise SystemExit(f"the valid file is not read: {ended} {errors[-2000:]}")
        findings.append({"number": at, "what": f"{ended} {errors[-200:]}".strip()})
        return at + 1 - self._start, outcomes, findings

    def _wait(self) -> str | None:
        """Why the process was ended, or how; None if it did all its work."""
        before, since, used_before = -1, time.monotonic(), 0.0
        while True:
            pid, status = os.waitpid(self._pid, os.WNOHANG)
            if pid:
                return None if status == 0 else f"the process ended with {os.waitstatus_to_exitcode(status)}"
            time.sleep(0.1)
            at = _PROGRESS.unpack(self._progress.read_bytes())[0]
            used = _cpu_s(self._pid)
            if at != before:
                before, since, used_before = at, time.monotonic(), used
            if at >= 0 and (used - used_before > LIMIT_S or time.monotonic() - since > _HANG_S):
                os.kill(self._pid, signal.SIGKILL)
                os.waitpid(self._pid, 0)
                return f"hang: more than {LIMIT_S:g} s"


def _cpu_s(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def campaign(
    state_file: Path, n: int, number: int, only: list[str], pause: Path | None, commit: str | None
) -> dict[str, Any]:
    """Run ``n`` inputs over all readers, from where the state is; returns the state."""
    from hostile import contract  # noqa: F401, before the first fork
    from hostile.readers import BY_NAME, READERS

    state = json.loads(state_file.read_text()) if state_file.exists() else {"readers": {}, "findings": []}
    full = sum(reader.share for reader in READERS)
    expected = {reader.name: round(n * reader.share / full) for reader in READERS if not only or reader.name in only}
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="isthmus-fuzz-", dir=memory) as scratch:
        while remaining := {name for name, count in expected.items() if _done(state, name)["inputs"] < count}:
            for reader in [BY_NAME[name] for name in expected if name in remaining]:
                while pause is not None and pause.exists():
                    time.sleep(2)
                row = _done(state, reader.name)
                start = row["inputs"]
                started_s = time.monotonic()
                ran, counts, findings = Batch(reader, start, expected[reader.name], number, Path(scratch)).run()
                row["inputs"] += ran
                row |= {name: row[name] + count for name, count in counts.items()}
                row["time_s"] += time.monotonic() - started_s
                row["commits"] = dict(row["commits"]) | {str(commit): row["commits"].get(str(commit), 0) + ran}
                state["findings"] += [{"reader": reader.name, "commit": commit, **finding} for finding in findings]
                for finding in findings:
                    print(f"{reader.name} {finding['number']}: {finding['what']}", flush=True)
                write_result(state_file, state)
    return state


def _done(state: dict[str, Any], name: str) -> dict[str, Any]:
    empty = {"inputs": 0, "read": 0, "refused": 0, "time_s": 0.0, "commits": {}}
    return state["readers"].setdefault(name, empty)


def main(arguments: list[str]) -> int:
    """Exit code 1 if there were findings."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--n", type=int, default=10_000, help="inputs over all readers (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="number of the campaign (default: %(default)s)")
    parser.add_argument("--only", nargs="+", default=[], metavar="READER", help="some of the readers")
    parser.add_argument("--state", type=Path, help="continue from this file, and write it after each batch")
    parser.add_argument("--pause-while", type=Path, metavar="FILE", help="start no batch while this file exists")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    certified = certificate(["benchmarks/fuzz.py", *arguments])
    with tempfile.TemporaryDirectory(prefix="isthmus-fuzz-") as folder:
        state_file = chosen.state or Path(folder, "state.json")
        state = campaign(state_file, chosen.n, chosen.seed, chosen.only, chosen.pause_while, certified["commit"])
    total = sum(row["inputs"] for row in state["readers"].values())
    result = {"benchmark": "fuzz", "certificate": certified, "inputs": total, **state}
    print(f"{total:,} inputs, {len(state['findings'])} findings")
    publish_result("fuzz", result, record=chosen.record, out=chosen.out)
    return 1 if state["findings"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
