"""What a run does before its checks and before its ranks join."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import isthmus
from isthmus.config.load import dump
from isthmus.config.schema import RunConfig
from isthmus.config.schema.train import TuneConfig
from isthmus.engine.linear.tuned_matmuls import TunedMatmuls
from isthmus.errors import DataError, OutputInUse, UsageError
from isthmus.platforms.cpu import CpuPlatform
from isthmus.recipes import process_setup, run
from isthmus.recipes.plan.validation import RunContext
from isthmus.recipes.run_dir import RunDir

SFT = RunConfig.model_validate({"recipe": "sft", "out": "o", "model": {"path": "m"}, "data": {"files": ["chats.json"]}})


@pytest.mark.parametrize(("world_size", "closed"), [("1", True), ("2", False)])
def test_failed_rank_reports_before_it_closes_groups(
    monkeypatch: pytest.MonkeyPatch, world_size: str, closed: bool
) -> None:
    """Closing NCCL groups may wait for the other ranks."""

    def validate(*_: object, **__: object) -> None:
        raise DataError("bad.")

    closes: list[bool] = []
    monkeypatch.setenv("WORLD_SIZE", world_size)
    monkeypatch.setattr(run, "validate", validate)
    monkeypatch.setattr(run, "close_groups", lambda: closes.append(True))
    with pytest.raises(DataError):
        isthmus.sft(SFT)
    assert bool(closes) == closed


def test_config_of_another_recipe_is_an_error() -> None:
    for recipe in (isthmus.dpo, isthmus.pretrain):
        with pytest.raises(UsageError, match=r"Call isthmus\.sft"):
            recipe(SFT)


@pytest.mark.slow
def test_a_run_leaves_cores_that_others_use_and_a_resumed_run_keeps_its_threads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def threads(*, resume: bool = False, config: RunConfig = SFT) -> tuple[int | None, tuple[str, ...]]:
        where = {"run_dir": RunDir(tmp_path), "resume": tmp_path if resume else None, "platform": CpuPlatform("test")}
        unused = cast(Any, None)
        unknown = {"plan": unused, "tokenizer": unused, "shape": unused, "prompts": ()}
        context = RunContext(config=config, precision="fp32", messages=(), **unknown, **where)
        adjusted = process_setup.leave_busy_cores(context)
        if not resume:
            RunDir(tmp_path).config.write_text(dump(adjusted.config))
        return adjusted.config.train.threads, adjusted.messages

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(process_setup, "cores", lambda: 4)
    for used, expected in ((3, 1), (1, 3), (4, 1)):
        monkeypatch.setattr(process_setup, "cores_in_use", lambda used=used: used)
        chosen, (message,) = threads()
        assert chosen == expected and f"other processes use {used} of this machine's 4 cores" in message
        assert threads(resume=True) == (expected, (f"train.threads={expected}: as when the run began",))
    monkeypatch.setattr(process_setup, "cores_in_use", lambda: 0)
    assert threads() == (None, ())
    monkeypatch.setattr(process_setup, "cores_in_use", lambda: 3)
    assert threads(resume=True) == (None, ())  # it began on free cores
    config = SFT.model_copy(update={"train": SFT.train.model_copy(update={"threads": 4})})
    assert threads(config=config) == (4, ())
    (tmp_path / "tune.json").write_text(TunedMatmuls(made_for={}, threads=2).to_json())
    tuned = SFT.model_copy(update={"tune": TuneConfig(file=str(tmp_path / "tune.json"))})
    assert threads(config=tuned) == (2, ("train.threads=2: measured by isthmus tune (tune.file)",))
    assert threads(config=tuned, resume=True) == (2, ("train.threads=2: as when the run began",))
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert threads() == threads(config=tuned) == (None, ())


def test_run_that_ended_while_this_one_waited_is_not_replaced(tmp_path: Path) -> None:
    """Another run wrote its first checkpoint after this command had looked for one."""
    config = SFT.model_copy(update={"out": str(tmp_path)})
    context = cast(RunContext, SimpleNamespace(config=config, run_dir=RunDir(tmp_path), resume=None))
    with run._locked(context):
        pass
    (tmp_path / "config.yaml").touch()
    (tmp_path / "checkpoints/iter_0000004").mkdir(parents=True)
    (tmp_path / "checkpoints/latest_checkpointed_iteration.txt").write_text("4")
    with pytest.raises(OutputInUse, match="another run, which has just ended"), run._locked(context):
        pass
    assert not (tmp_path / ".lock").exists()
