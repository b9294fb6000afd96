from __future__ import annotations

import inspect
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing import PContext

from isthmus.launch import local_launcher
from isthmus.launch.local_launcher import _Signals


def test_torch_elastic_has_the_default_that_the_launcher_sets() -> None:
    parameters = inspect.signature(PContext.close).parameters
    assert list(parameters) == ["self", "death_sig", "timeout"]
    assert [parameters[name].default is not inspect.Parameter.empty for name in ("death_sig", "timeout")] == [
        True,
        True,
    ]


def test_signal_that_interrupts_the_handler_of_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signals = _Signals(tmp_path / "stop", saves=True)
    signals.ranks_started = True
    interrupted = [True]

    def monotonic() -> float:
        if interrupted.pop() if interrupted else False:
            signals._received(signal.SIGHUP, None)
        return 1.0

    monkeypatch.setattr(local_launcher.time, "monotonic", monotonic)
    with signals:
        signals._received(signal.SIGHUP, None)
    assert signals.stop_requested and not signals.killed and (tmp_path / "stop").exists()
