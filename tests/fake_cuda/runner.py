"""Runs tasks in processes where torch sees a GPU."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_cuda.guard import build_guard
from shared_server import SharedServer

FOLDER = Path(__file__).resolve().parent


class TaskFailed(AssertionError):
    """With the traceback of the task."""


class FakeCuda:
    """Client of :mod:`fake_cuda.worker`, which imports once for all processes of pytest."""

    def __init__(self, log: Path) -> None:
        """Raises :class:`fake_cuda.guard.Unavailable`."""
        self._log = log
        variables = {"LD_PRELOAD": str(build_guard()), "OMP_NUM_THREADS": "1"}
        self._worker = SharedServer(FOLDER / "worker.py", os.environ | variables, log=log)

    def run(self, task: Callable[..., Any], /, *, gpu: str = "sm_90", **settings: Any) -> Any:
        """Run ``task(**settings)`` in a fork with a :class:`fake_cuda.fake_tensors.FakeGpuMode` and return its result.

        Args:
            task: a function of a module below ``tests/``, for example of the test's own file. Its result must be JSON.
            gpu: a key of :data:`fake_cuda.gpu.GPUS`; ``gfx942`` and ``gfx950`` are ROCm.
            settings: for the task; JSON.
        """
        module = Path(inspect.getfile(task)).resolve().relative_to(FOLDER.parent).with_suffix("")
        request = {"task": ".".join([*module.parts, task.__name__]), "gpu": gpu, "settings": settings}
        self._worker.send(request)
        reply = self._worker.receive()
        if "error" in reply:
            raise TaskFailed(f"{request['task']} on {gpu}\n{reply['error']}\n{self._log.read_text()[-1000:]}")
        return reply["result"]

    def close(self) -> None:
        self._worker.close()
