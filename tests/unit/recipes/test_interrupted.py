"""A second Ctrl-C ends a run with one rank with 130, whatever a library made of the interrupt."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from isthmus.config.schema import RunConfig
from isthmus.errors import IOFailure, explain
from isthmus.recipes import run


@pytest.fixture
def interrupted_save(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run writes a checkpoint when Ctrl-C is pressed twice."""

    def write(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        try:
            os.kill(os.getpid(), signal.SIGINT)
        except KeyboardInterrupt as error:  # as torch's writer does
            raise IOFailure("the checkpoint could not be written: KeyboardInterrupt") from error

    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("isthmus.train.stop.SECOND_REQUEST_S", 0.0)
    monkeypatch.setattr(run, "validate", write)


def config(out: Path) -> RunConfig:
    return RunConfig.model_validate(
        {"recipe": "sft", "model": {"path": "model"}, "data": {"files": ["chats.json"]}, "out": str(out)}
    )


@pytest.mark.usefixtures("interrupted_save")
def test_the_last_checkpoint_is_named(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoints" / "iter_0000005"
    checkpoint.mkdir(parents=True)
    (checkpoint / ".metadata").touch()
    (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").write_text("5")
    with pytest.raises(KeyboardInterrupt) as error:
        run.run_recipe(config(tmp_path))
    code, message = explain(error.value)
    assert code == 130 and message.endswith(f"The same command resumes from {checkpoint}.")


@pytest.mark.usefixtures("interrupted_save")
def test_a_run_without_checkpoints_starts_again(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt, match="killed before its first checkpoint"):
        run.run_recipe(config(tmp_path))
