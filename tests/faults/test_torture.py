"""Commands that are killed, or whose system calls fail, end with the result of an undisturbed run: few cases of
benchmarks/torture.py, whose campaigns have hundreds.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from faults.fork_server import ForkServer

KILLED = ("train", "prepare", "grpo")
FURTHER = (
    "train, uneven", "train, lora", "train, 2 ranks", "train, 1 rank of 2", "grpo, 2 ranks",
    "convert to torch_dist", "convert to legacy", "merge",
)  # fmt: skip


@pytest.fixture(scope="module")
def torture(repository: Path) -> ModuleType:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(repository / "benchmarks"))
        result = importlib.import_module("torture")
    result.MOST_KILLS = 2  # type: ignore[attr-defined]
    return result


@pytest.fixture(scope="module")
def campaign(torture: ModuleType, isthmus: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from faults.failing_calls import library

    if library() is None:
        pytest.skip("no C compiler, which builds the library that lets system calls fail")
    return torture.Campaign(tmp_path_factory.mktemp("torture"), isthmus)


def kills(campaign: Any, kind: str, number: int) -> None:
    row = campaign.run(number, 0, [kind])
    assert row["lost"] is None, row


@pytest.mark.thorough_cases("train", "grpo")
@pytest.mark.parametrize("kind", KILLED)
def test_kills(campaign: Any, kind: str) -> None:
    kills(campaign, kind, 2)


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(2))
@pytest.mark.parametrize("kind", FURTHER)
def test_further_kills(campaign: Any, kind: str, number: int) -> None:
    kills(campaign, kind, number)


@pytest.mark.parametrize("kind", ["convert to torch_dist", "prepare"])
def test_the_lock_of_a_killed_command_is_released(campaign: Any, kind: str) -> None:
    """It is killed when its output is complete, before the last rename."""
    files, lost = campaign.kill_at(kind, "rename .*")
    assert lost is None and [file for file in files if file.endswith(".lock")], files


@pytest.mark.thorough_cases(
    "convert to legacy-open .*/model_optim_rng.pt-ENOSPC-73",
    "merge-ftruncate .*/model.safetensors-ENOSPC-73",
    "train-mkdir .*/tensorboard-EIO-0",
    "train-open .*/tokenizer.json-EIO-74",
    "train-write .*/common.pt-ENOSPC-73",
)
@pytest.mark.parametrize(
    ("kind", "call", "error", "code"),
    [
        ("train", "open .*/tokenizer.json", "EIO", 74),
        ("train", "write .*/common.pt", "ENOSPC", 73),
        ("train", "mkdir .*/tensorboard", "EIO", 0),
        ("train", "write .*/metrics.jsonl", "ENOSPC", 0),
        ("convert to torch_dist", "open .*/common.pt", "EIO", 74),
        ("convert to legacy", "open .*/model_optim_rng.pt", "ENOSPC", 73),
        ("prepare", "write .*/pair.idx", "EIO", 74),
        ("merge", "ftruncate .*/model.safetensors", "ENOSPC", 73),
    ],
)
def test_failed_call(campaign: Any, kind: str, call: str, error: str, code: int) -> None:
    """The first such call fails."""
    row = campaign.fail_at(kind, call, error)
    assert row["lost"] is None and row["codes"] == [code], row


def test_a_lost_row_is_found(torture: ModuleType, tmp_path: Path) -> None:
    """The comparison itself."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "mfu": 0.1}\n{"step": 1, "valid_loss": 2.0}\n')
    (tmp_path / "model.safetensors").write_bytes(b"1")
    expected = torture.outputs(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "mfu": 0.2}\n{"step": 1, "valid_loss": 2.0}\n')
    assert torture.difference(torture.outputs(tmp_path), expected) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "mfu": 0.2}\n')
    assert "metrics.jsonl: 1 is not 2" in torture.difference(torture.outputs(tmp_path), expected)
    (tmp_path / ".tmp-hf").touch()
    assert torture.difference(torture.outputs(tmp_path), expected) == ".tmp-hf is left over"


def test_a_stop_may_keep_another_checkpoint(torture: ModuleType) -> None:
    """With ``checkpoint.keep=2`` of steps 2, 4 and 6, and a stop after step 5."""
    expected = {f"out/checkpoints/iter_000000{step}/common.pt": step for step in (4, 6)}
    values = {f"out/checkpoints/iter_000000{step}/common.pt": step for step in (5, 6)}
    assert torture.difference(*torture.same_checkpoints(values, expected)) is None
    kept_more = torture.same_checkpoints(values | expected, expected)
    assert torture.difference(*kept_more) == "out/checkpoints/iter_0000005/common.pt is left over"
    values["out/checkpoints/iter_0000006/common.pt"] = 0
    assert "iter_0000006" in torture.difference(*torture.same_checkpoints(values, expected))
    del values["out/checkpoints/iter_0000005/common.pt"]
    assert "iter_0000004" in torture.difference(*torture.same_checkpoints(values, expected))
