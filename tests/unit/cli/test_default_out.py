"""The run folder of a command without --out."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.cli import process
from isthmus.cli.train_verbs import default_out, hand_to_ranks
from isthmus.config.load import load_config
from isthmus.errors import UsageError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ISTHMUS_DEFAULT_OUT", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-0.6B", "sft-Qwen3-0.6B-1"),
        ({"path": "preset:qwen3-0.6b", "init": "random"}, "sft-qwen3-0.6b-1"),
        ({"path": "/models/my model/"}, "sft-my-model-1"),
        ("runs/sft-a-1/hf", "sft-sft-a-1-1"),
        ({"config": {"model_type": "llama"}}, "sft-llama-1"),
        (None, "sft-model-1"),
    ],
)
def test_the_name_has_recipe_and_model(model: object, name: str) -> None:
    assert default_out({"recipe": "sft", "model": model}, is_rank=False) == f"runs/{name}"


def test_no_earlier_folder_is_used_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"recipe": "dpo", "model": "m"}
    for name in ("dpo-m-1", "dpo-m-9", "dpo-m-10-rehearsal", "sft-m-20", "dpo-m-x-30"):
        (folder / "runs" / name).mkdir(parents=True)
    assert default_out(settings, is_rank=False) == "runs/dpo-m-11"
    monkeypatch.setenv("ISTHMUS_DEFAULT_OUT", "")
    hand_to_ranks("runs/dpo-m-11")
    (folder / "runs" / "dpo-m-11").mkdir()  # rank 0 was faster
    assert default_out(settings, is_rank=False) == "runs/dpo-m-11"


def test_ranks_of_other_launchers_need_a_name() -> None:
    with pytest.raises(UsageError, match="one run folder, from which a restart resumes"):
        default_out({}, is_rank=True)


def test_a_given_folder_wins() -> None:
    flags = {"model": "org/m", "data": ["d"]}
    chosen = load_config("sft", None, [], flags, default_out=lambda settings: default_out(settings, is_rank=False))
    assert chosen.out == "runs/sft-m-1"
    assert load_config("sft", None, ["out=a"], flags, default_out=lambda _: "b").out == "a"
    with pytest.raises(UsageError, match="out"):
        load_config("sft", None, [], flags)


def test_messages_name_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "default_out", "runs/a-1")
    message = "the state is saved. The same command resumes from there. Run the same command again to continue."
    assert process.naming_default_out(message) == (
        "the state is saved. The same command with --out runs/a-1 resumes from there. Run the same command again with "
        "--out runs/a-1 to continue."
    )
