"""``isthmus run`` with a script that imports the installed megatron.core as Megatron-LM does."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from faults.command import finished, start
from faults.fork_server import ForkServer
from faults.hosts import rank_variables

SCRIPT = Path(__file__).with_name("tiny_gpt.py")
RUN = ("run", "--platform", "cpu")


def write(tmp_path: Path, *lines: str) -> Path:
    path = tmp_path / "script.py"
    path.write_text("\n".join(lines) + "\n")
    return path


def test_two_ranks_train(isthmus: ForkServer) -> None:
    """As ranks of torchrun, with tensor and sequence parallelism."""
    ranks = [([*RUN, str(SCRIPT), "--data", "a", "b"], variables) for variables in rank_variables(2)]
    first, second = isthmus.start_ranks([ranks]).wait()
    assert first.returncode == second.returncode == 0, (first, second)
    line = first.stdout.splitlines()[-1]
    assert line.endswith("args --data a b"), "the command line of isthmus changes lists after --data"
    assert line.replace("rank 0", "rank 1") == second.stdout.splitlines()[-1]
    before, after = map(float, line.split()[3:5])
    assert after < before
    assert "isthmus run: environment: CUDA_DEVICE_MAX_CONNECTIONS=1 TORCHDYNAMO_DISABLE=1\n" in first.stderr
    assert "isthmus" not in second.stderr, "rank 0 says what was done"


SPAWNING = """
import multiprocessing, os, sys, torch

class Answer:
    def __init__(self):
        self.device, self.main = str(torch.zeros(1, device="cuda").device), __name__

def answer(queue):
    torch.distributed.init_process_group("nccl")  # as ROCm's fork does in the process that writes a checkpoint
    torch.distributed.barrier()
    queue.put(Answer())

if __name__ == "__main__":
    if os.environ["RANK"] == "0":
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        child = context.Process(target=answer, args=(queue,))
        child.start()
        found = queue.get()
        child.join()
        print("child", found.device, found.main, isinstance(found, Answer), flush=True)
    print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:], flush=True)
    sys.exit(3 if os.environ["RANK"] == "0" else 0)
"""


@pytest.mark.processes
def test_ranks_and_spawned_processes(isthmus: ForkServer, tmp_path: Path) -> None:
    """All ranks print, as under torchrun, and a spawned process has the patches."""
    done = isthmus(*RUN, "--nproc", "2", write(tmp_path, SPAWNING), "--nproc", "9")
    assert done.returncode == 3, done
    lines = sorted(done.stdout.splitlines())
    assert lines == ["child cpu __mp_main__ True", "rank 0 of 2 --nproc 9", "rank 1 of 2 --nproc 9"]


def test_exception_of_the_script(isthmus: ForkServer, tmp_path: Path) -> None:
    script = write(tmp_path, "def fails():", "    raise ValueError('as asked')", "fails()")
    done = isthmus(*RUN, script)
    assert done.returncode == 1
    assert done.errors == [f"isthmus: script.py failed with ValueError: as asked ({script}:2)"]
    trace = done.stderr[done.stderr.index("Traceback") :].splitlines()
    assert trace[1] == f'  File "{script}", line 3, in <module>', "frames of isthmus come first"


@pytest.mark.parametrize(
    ("lines", "code", "error"),
    [
        (["import sys", "sys.exit('no data')"], 1, "isthmus: no data"),
        (["import no_such_package.part"], 2, "isthmus: script.py imports no_such_package, which is not installed: "),
        (["import os, signal", "os.kill(os.getpid(), signal.SIGTERM)"], -signal.SIGTERM, None),
    ],
)
def test_exit_codes(lines: list[str], code: int, error: str | None, isthmus: ForkServer, tmp_path: Path) -> None:
    done = isthmus(*RUN, write(tmp_path, *lines))
    assert done.returncode == code
    assert [line[: len(error or "")] for line in done.errors] == ([error] if error else [])


def test_missing_script(isthmus: ForkServer) -> None:
    assert "no.py does not exist" in isthmus(*RUN, "no.py").error(66)


@pytest.mark.thorough
@pytest.mark.processes
def test_stop_of_two_ranks(tmp_path: Path) -> None:
    lines = "import pathlib, os, time", "pathlib.Path('pid-' + os.environ['RANK']).touch()", "time.sleep(60)"
    script = write(tmp_path, *lines)
    process = start(*RUN, "--nproc", "2", str(script), cwd=tmp_path)
    while len(list(tmp_path.glob("pid-*"))) < 2:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    done = finished(process)
    assert done.returncode == 143
    assert "SIGTERM: sent to the ranks." in done.stderr
    assert done.errors[-1] == "isthmus: stopped by a signal, as requested."
