"""A process of a GPU benchmark, in a session of its own, so that all that it starts can be killed with it."""

from __future__ import annotations

import ctypes
import importlib
import multiprocessing
import os
import signal
import sys
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from gpu_turns.cases import Absent
from gpu_turns.rows import ROWS, append

_PR_SET_PDEATHSIG = 1


def start(module: str, spec: dict[str, Any], rows: Path, *, threads: int, log: Path, fork: bool) -> BaseProcess:
    """Start ``module.run(spec)``, which appends to ``rows``.

    ``fork`` saves the imports of a process, in a dry run: the parent must not have used torch.
    """
    environment = {
        ROWS: str(rows), "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(log.parent / "datasets"),
    }  # fmt: skip
    if module != "gpu_turns.tests_turn":  # Trainer would use all GPUs
        environment["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    context: Any = multiprocessing.get_context("fork" if fork else "spawn")
    process: BaseProcess = context.Process(target=_take_turn, args=(module, spec, environment, log))
    process.start()
    return process


def kill(process: BaseProcess) -> None:
    """End the process and its children; without effect if it has ended."""
    if process.is_alive() and process.pid is not None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # before it has a session
    process.join()


def _take_turn(module: str, spec: dict[str, Any], environment: dict[str, str], log: Path) -> None:
    os.setsid()
    if sys.platform == "linux":  # ends with its parent, also if that is killed
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    try:
        importlib.import_module(module).run(spec)
    except Absent as absent:
        append("absent", why=str(absent))
    except (Exception, SystemExit) as error:  # any failure of one part; the others still run
        append("error", why=f"{type(error).__name__}: {error}"[-2000:])
        raise
