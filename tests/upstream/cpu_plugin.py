"""Runs Megatron-LM's own unit tests on a CPU, and records the outcome of each as a line of JSON.

Not a test: ``benchmarks/upstream_tests.py`` calls :func:`prepare` and passes :class:`Outcomes` to pytest.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

_TEST_DATA = "tests.test_utils.python_scripts.download_unit_tests_dataset"


def prepare(megatron_lm: Path) -> None:
    """Before the first import of megatron.core: what `isthmus run` does on a CPU, and gloo instead of NCCL."""
    sys.dont_write_bytecode = True  # in the checkout
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # the compiler needs the name of a GPU
    sys.path.append(str(megatron_lm))  # the installed megatron-core comes first
    from isthmus.engine.upstream import script_patches

    script_patches.install("cpu", megatron_lm, lambda line: None)
    _one_gpu_per_rank()
    from megatron.core import utils
    from packaging.version import Version

    core: Any = utils
    core._te_version = core._te_version or Version("0")  # a fixture of all tests compares it
    # A fixture downloads data sets of 2021; tests that need them fail.
    stub: Any = ModuleType(_TEST_DATA)
    stub.download_and_extract_asset = _refuse
    sys.modules[_TEST_DATA] = stub


def _refuse(**_: object) -> None:
    raise ImportError("no data sets are downloaded")


def _one_gpu_per_rank() -> None:
    import torch.distributed

    cuda: Any = torch.cuda
    cuda.device_count = lambda: int(os.environ.get("WORLD_SIZE", "1"))

    distributed: Any = torch.distributed

    def on_cpu(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args = tuple("gloo" if argument == "nccl" else argument for argument in args)
        if "nccl" in str(kwargs.get("backend")):
            kwargs["backend"] = "gloo"
        return function(*args, **{name: value for name, value in kwargs.items() if name != "device_id"})

    for name in ("init_process_group", "new_group"):
        on_gloo = partial(on_cpu, getattr(distributed, name))
        for module in (distributed, distributed.distributed_c10d):  # new_subgroups calls it there
            setattr(module, name, on_gloo)


class TestTimeout(BaseException):
    """Not an Exception, which a test may catch."""

    __test__ = False


class Outcomes:
    """A pytest plugin: one line for each test that begins, one for each outcome. No ``selected`` tests means all."""

    def __init__(self, file: Path, limit_s: float, selected: frozenset[str], done: frozenset[str]) -> None:
        self._file, self._limit_s, self._selected, self._done = file, limit_s, selected, done
        self._failure: dict[str, str] = {}
        self._skipped: str | None = None

    def _write(self, **line: Any) -> None:
        with self._file.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        expected = self._selected or {item.nodeid for item in items}
        items[:] = [item for item in items if item.nodeid in expected - self._done]
        self._write(collected=[item.nodeid for item in items])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            skipped = report.outcome == "skipped"
            reason = report.longrepr[2] if skipped and isinstance(report.longrepr, tuple) else report.longreprtext
            self._write(test=report.nodeid, outcome="skipped" if skipped else "failed", reason=str(reason)[-600:])

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        def expire(*_: object) -> None:
            raise TestTimeout(f"the test took more than {self._limit_s:.0f} s")

        self._failure, self._skipped = {}, None
        self._write(begins=item.nodeid)
        signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, self._limit_s, 5)
        yield
        signal.setitimer(signal.ITIMER_REAL, 0)
        if self._failure:
            self._write(test=item.nodeid, outcome="failed", **self._failure)
        elif self._skipped is not None:
            self._write(test=item.nodeid, outcome="skipped", reason=self._skipped)
        else:
            self._write(test=item.nodeid, outcome="passed")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self._failure:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = crash.message if crash else report.longreprtext[-600:]
            where = f"{Path(crash.path).name}:{crash.lineno}" if crash else ""
            self._failure = {"reason": message[:600], "where": where, "frames": _frames(report)}
        elif report.skipped:
            longrepr = report.longrepr
            self._skipped = str(longrepr[2] if isinstance(longrepr, tuple) else getattr(report, "wasxfail", ""))


def _frames(report: pytest.TestReport) -> str:
    """Files and lines of the traceback: those in Megatron-LM decide what a test needs."""
    entries = getattr(getattr(report.longrepr, "reprtraceback", None), "reprentries", [])
    places = [getattr(entry, "reprfileloc", None) for entry in entries]
    return " ".join(f"{Path(place.path).name}:{place.lineno}" for place in places if place)[-400:]
