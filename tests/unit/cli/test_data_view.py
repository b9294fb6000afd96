"""The output of ``isthmus data view`` on terminals, in pipes and as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from isthmus.cli.main import main
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("view")
    save_tokenizer(train_tokenizer(["the sea"], vocab_size=270), folder / "t")
    chat = [{"role": "user", "content": "Sea?"}, {"role": "assistant", "content": "Salt\x1b[31m\u202e."}]
    (folder / "d.jsonl").write_text(json.dumps({"messages": chat}) + "\n")
    return ["data", "view", str(folder / "d.jsonl"), "--tokenizer", str(folder / "t")]


def test_loss_tokens_are_marked_and_control_characters_are_visible(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{words[2]}:1  ") and "\x1b" not in out and "\u202e" not in out
    assert "assistant\n[[Salt\\x1b[31m\\u202e.<|im_end|>]]\n" in out


@pytest.mark.parametrize("no_color", ["", "1"])
def test_colours_are_for_terminals_without_no_color(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, no_color: str
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(words) == 0
    out = capsys.readouterr().out
    assert ("\x1b[32mSalt" in out, "[[Salt" in out) == (not no_color, bool(no_color))


def test_json_has_tokens_and_mask(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "--json"]) == 0
    (sample,) = json.loads(capsys.readouterr().out)["samples"]
    assert sample["tokens"] == len(sample["input_ids"]) == len(sample["loss_mask"])
    assert sample["loss_tokens"] == sum(sample["loss_mask"]) > 5
    assert [part["loss"] for part in sample["parts"]] == [False, True]


@pytest.mark.parametrize(
    ("more", "code", "message"),
    [
        (["--index", "1"], 2, "no record 1"),
        (["--kind", "chats"], 2, "--kind chats is not known"),
        (["--columns", "text=nothing"], 65, "no field nothing"),
        (["--kind", "text", "--seq-length", "4"], 2, "text is not cut"),
    ],
)
def test_invalid_options_are_errors(
    words: list[str], capsys: pytest.CaptureFixture[str], more: list[str], code: int, message: str
) -> None:
    assert main([*words, *more]) == code
    assert message in capsys.readouterr().err


def test_the_tokenizer_is_that_of_a_run_or_has_to_be_named(
    words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(words[:3]) == 2
    assert "Add --tokenizer DIR." in capsys.readouterr().err
    (tmp_path / "config.yaml").write_text("recipe: sft\n")
    assert main(["data", "view", str(tmp_path), *words[3:], "--loss-on", "all"]) == 2
    assert "--tokenizer, --loss-on: " in capsys.readouterr().err
