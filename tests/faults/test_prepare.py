"""``isthmus prepare`` continues from its finished parts after it was killed, and reports a killed worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from faults.command import environment
from isthmus.errors import OutputExists
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import save_tokenizer
from isthmus.recipes.data.prepare import prepare

pytestmark = pytest.mark.thorough

# The command line with small parts. The main process, or the worker that gets a given record, kills itself: a worker
# that is killed from outside may be idle, and then nothing fails.
KILLED = """
import os, signal, sys
from isthmus.cli import prepare as command
from isthmus.cli.main import main
from isthmus.data.readers import json_chunks
from isthmus.recipes.data import prepare_shards, prepare_workers
victim, at = sys.argv[1], int(sys.argv[2])
json_chunks.CHUNK_BYTES, prepare_shards.PART_TOKENS = 300, 200
tokenize = prepare_workers._tokenize
def kill():
    os.kill(os.getpid(), signal.SIGKILL)
def show(self, stats):
    if stats.records >= at:
        kill()
def _tokenize(chunk):
    if any(record.where.endswith(f".jsonl:{at}") for record in chunk.parse()):
        kill()
    return tokenize(chunk)
if victim == "main":
    command._ProgressLine.show = show
if victim == "worker":
    prepare_workers.start_method, prepare_workers._tokenize = lambda: "fork", _tokenize
sys.exit(main(sys.argv[3:]))
"""


def run(victim: str, at: int, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", KILLED, victim, str(at), "prepare", *args]
    return subprocess.run(command, env=environment(), capture_output=True, text=True)


@pytest.fixture
def args(tmp_path: Path) -> list[str]:
    save_tokenizer(train_tokenizer(["the sea is wide"], vocab_size=280), tmp_path / "tokenizer")
    with (tmp_path / "a.jsonl").open("w") as file:
        for k in range(80):
            file.write(json.dumps({"instruction": f"question {k}", "output": f"the sea {k}" * (1 + k % 7)}) + "\n")
    return [str(tmp_path / "a.jsonl"), "--tokenizer", str(tmp_path / "tokenizer"), "--workers", "2"]


def outputs(prefix: Path) -> dict[str, bytes]:
    return {path.name[len(prefix.name) :]: path.read_bytes() for path in prefix.parent.glob(f"{prefix.name}.[!p]*")}


def test_killed_prepare_continues(tmp_path: Path, args: list[str]) -> None:
    prepare([args[0]], tmp_path / "whole", args[2], workers=1)
    full = outputs(tmp_path / "whole")
    assert len(full) == 4
    out = tmp_path / "out"
    assert run("main", 40, *args, str(out)).returncode == -signal.SIGKILL
    assert not outputs(out) and list(Path(f"{out}.partial").glob("*.npz"))
    lost = run("worker", 60, *args, str(out))
    assert lost.returncode == 76, lost
    (line,) = [line for line in lost.stderr.splitlines() if line.startswith("isthmus:")]
    assert "a worker process ended before its result" in line and "Traceback" not in lost.stderr
    assert not outputs(out)
    parts = len(list(Path(f"{out}.partial").glob("*.npz")))
    assert parts
    done = run("none", 0, *args, str(out), "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["records"] == 80
    assert outputs(out) == full and not Path(f"{out}.partial").exists()
    os.truncate(f"{out}.bin", 10)  # a finished output is never used as a part
    with pytest.raises(OutputExists):
        prepare([args[0]], out, args[2], workers=1)
