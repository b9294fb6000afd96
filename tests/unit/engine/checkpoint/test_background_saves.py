"""The order of copies on a GPU for a save beside a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from isthmus.config.schema import ParallelConfig
from isthmus.engine.checkpoint import background_saves
from isthmus.engine.checkpoint.background_saves import Saves
from isthmus.engine.checkpoint.checkpoint_writer import SaveOptions
from isthmus.engine.checkpoint.run_state import Progress


def test_a_save_beside_a_step_waits_for_the_gather_of_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new stream does not wait for kernels of that of training; its copies could read weights before they arrive."""
    calls: list[str] = []

    class Event:
        def record(self, stream: str) -> None:
            calls.append(f"event on {stream}")

    class Stream:
        def __init__(self, _device: torch.device) -> None:
            self.waits = False

        def wait_event(self, _event: Event) -> None:
            self.waits = True

    @contextmanager
    def use(stream: Stream) -> Iterator[None]:
        calls.append(f"copies on a stream that {'waits' if stream.waits else 'does not wait'}")
        yield

    changed = {"Event": Event, "Stream": Stream, "stream": use, "set_device": lambda _device: None}
    changed["current_stream"] = lambda _device: "training"
    for name, value in changed.items():
        monkeypatch.setattr(torch.cuda, name, value)
    writer = SimpleNamespace(complete=lambda _group: calls.append("written"))
    monkeypatch.setattr(
        background_saves, "take_state", lambda *_arguments, **_options: calls.append("gather") or writer
    )
    monkeypatch.setattr(Saves, "_new_group", lambda _saves: None)
    saves = Saves(Path(), ParallelConfig(), asynchronous=False, saved=lambda *_: None, log=lambda _: None)
    stepper: Any = SimpleNamespace(device=torch.device("cuda"))
    _, save = saves.prepare(stepper, Progress(step=1, data=""), SaveOptions(keep=1))
    save()
    assert calls == ["gather", "event on training", "copies on a stream that waits", "written"]
