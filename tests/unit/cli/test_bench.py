"""What ``isthmus bench`` refuses before anything is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.cli.main import parse_and_run
from isthmus.errors import UsageError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--nproc", "0,2"], "Write --nproc 8 or --nproc 1,2,4"),
        (["--nproc", "two"], "is not a list of numbers of ranks"),
        (["config.json"], "is not a config file"),
        (["train.steps=10"], "Use these instead of train.steps"),
        (["train.micro_batch_size=3,5", "model.path=m"], "is not a multiple of micro_batch_size=3"),
    ],
)
def test_refusals(words: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        parse_and_run(["bench", *words, "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


def test_ranks_cannot_start_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UsageError, match="without torchrun or srun"):
        parse_and_run(["bench", "model.path=m"])
