"""Seconds from the start of `isthmus sft` to its first line, and to the second, which comes after the imports.

python benchmarks/first_line.py --record
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from certificate import REPOSITORY, certificate, publish_result
from rounds import median, spread

COMMAND = ["-m", "isthmus", "sft", "--model", "no-such-model", "--data", "chats.json", "--out", "run"]
"""The second line is the error that the model does not exist, which needs torch and Megatron-Core."""


def start() -> dict[str, float]:
    """One run of the command: seconds until each line."""
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY / "src"), "HF_HUB_OFFLINE": "1"}
    with tempfile.TemporaryDirectory(prefix="isthmus-bench-") as folder:
        started_s = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *COMMAND], cwd=folder, env=environment, stderr=subprocess.PIPE, text=True
        )
        assert process.stderr is not None
        times_s = [time.perf_counter() - started_s for _ in process.stderr]
        process.wait()
    first_s, second_s = times_s
    return {"first_line_s": first_s, "second_line_s": second_s}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="runs of the command (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write the result here")
    parser.add_argument("--record", action="store_true", help="write the result to benchmarks/results/")
    chosen = parser.parse_args(arguments)
    certified = certificate(["benchmarks/first_line.py", *arguments])
    turns = [start() for _ in range(chosen.rounds)]
    result: dict[str, object] = {"benchmark": "first-line", "certificate": certified}
    for name in turns[0]:
        result |= {name: median(turns, name), f"{name}_rounds": spread(turns, name)}
        print(f"{name:<14} {median(turns, name):6.2f}")
    publish_result("first-line", result, record=chosen.record, out=chosen.out)


if __name__ == "__main__":
    main(sys.argv[1:])
