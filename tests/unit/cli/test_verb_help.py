"""What ``isthmus`` alone says."""

from __future__ import annotations

from pathlib import Path

import pytest

from isthmus.cli.main import main
from isthmus.cli.verb_help import next_steps


def test_an_empty_folder_has_demo_and_init(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([]) == 0
    out = capsys.readouterr().out
    assert "isthmus demo" in out and "isthmus init" in out and "isthmus --help" in out


def test_a_config_is_started_with_its_recipe(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("# Written\nrecipe: dpo   # why\nmodel: m\n")
    text = next_steps(tmp_path)
    assert "isthmus dpo run.yaml" in text and "isthmus init" not in text


def test_the_last_run_is_talked_to(tmp_path: Path) -> None:
    for name in ("runs/a", "runs/my b"):
        (tmp_path / name / "hf").mkdir(parents=True)
        (tmp_path / name / "config.yaml").write_text("recipe: sft\n")
    assert "isthmus chat 'runs/my b'" in next_steps(tmp_path)


def test_a_run_that_stopped_is_continued(tmp_path: Path) -> None:
    (tmp_path / "runs" / "a" / "checkpoints").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "config.yaml").write_text("recipe: kto\n")
    text = next_steps(tmp_path)
    assert "isthmus kto runs/a/config.yaml --out runs/a" in text and "isthmus chat" not in text
