"""Runs tasks in processes where torch sees a GPU."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_cuda.guard import build_guard

FOLDER = Path(__file__).resolve().parent


class TaskFailed(AssertionError):
    """With the traceback of the task."""


class FakeCuda:
    """Client of :mod:`fake_cuda.worker`, which pays for the imports once."""

    def __init__(self, log: Path) -> None:
        """Raises :class:`fake_cuda.guard.Unavailable`."""
        self._log = log
        variables = {"LD_PRELOAD": str(build_guard()), "OMP_NUM_THREADS": "1"}
        with log.open("w") as stderr:
            self._worker = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(FOLDER / "worker.py")],
                env=os.environ | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
            )  # fmt: skip

    def run(self, task: Callable[..., Any], /, *, gpu: str = "sm_90", **settings: Any) -> Any:
        """Run ``task(**settings)`` in a fork with a :class:`fake_cuda.fake_tensors.FakeGpuMode` and return its result.

        Args:
            task: a function of a module below ``tests/``, for example of the test's own file. Its result must be JSON.
            gpu: a key of :data:`fake_cuda.gpu.GPUS`; ``gfx942`` and ``gfx950`` are ROCm.
            settings: for the task; JSON.
        """
        module = Path(inspect.getfile(task)).resolve().relative_to(FOLDER.parent).with_suffix("")
        request = {"task": ".".join([*module.parts, task.__name__]), "gpu": gpu, "settings": settings}
        assert self._worker.stdin and self._worker.stdout
        self._worker.stdin.write(json.dumps(request, default=str) + "\n")
        self._worker.stdin.flush()
        answer = self._worker.stdout.readline()
        if not answer:
            raise TaskFailed(f"the worker has ended:\n{self._log.read_text()[-3000:]}")
        reply = json.loads(answer)
        if "error" in reply:
            raise TaskFailed(f"{request['task']} on {gpu}\n{reply['error']}\n{self._log.read_text()[-1000:]}")
        return reply["result"]

    def close(self) -> None:
        self._worker.kill()
        self._worker.communicate()
