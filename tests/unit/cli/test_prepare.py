"""The output of ``isthmus prepare``, and invalid options."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from isthmus.cli.main import main
from isthmus.cli.prepare import _with_options, parse_columns
from isthmus.config.load import load_config
from isthmus.hf.tiny_model import train_tokenizer
from isthmus.hf.tokenizer.tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(train_tokenizer(["the sea"], vocab_size=270), folder)
    return str(folder)


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for name, text in (("a", "the sea"), ("b", "")):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"body": text}) + "\n" + json.dumps({"text": "x"}) + "\n")
    return [str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl"), str(tmp_path / "out")]


@pytest.mark.processes
def test_prepare_prints_its_result(files, tokenizer, capsys):
    words = ["prepare", *files, "--tokenizer", tokenizer, "--columns", "text=body", "--on-error", "skip"]
    assert main([*words, "--workers", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["kind"], result["records"], result["samples"], result["skipped"]) == ("text", 4, 1, 2)
    assert "a.jsonl:2: no field body" in result["skipped_first_reasons"][0]
    assert json.loads(Path(f"{files[-1]}.json").read_text())["kind"] == "text"
    assert main([*words, "--workers", "1"]) == 73
    assert f"{files[-1]}.bin exists already" in capsys.readouterr().err
    words[3] += "2"
    assert main([*words, "--workers", "1"]) == 0
    printed = capsys.readouterr()
    assert "out2: text, 4 records -> 1 sample, " in printed.out
    assert "skipped: " in printed.err


@pytest.mark.parametrize(
    "text",
    [
        "prompt=q,completion=the answer",
        "{prompt: q, completion: the answer}",
        '{"prompt": "q", completion: "the answer"}',
    ],
)
def test_columns_are_those_of_the_setting(text: str) -> None:
    columns = {"prompt": "q", "completion": "the answer"}
    assert parse_columns([text]) == parse_columns([f"data.columns={text}"]) == columns
    config = load_config("sft", None, [f"data.columns={text}"], {"model": "m", "data": ["d"], "out": "o"})
    assert config.data.columns == columns == parse_columns(["prompt=q", "{completion: the answer}"])


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--kind", "chats"], 2, "--kind chats is not known. Use text, chat, preference, unpaired, prompt."),
        (["--overlong", "cut"], 2, "--overlong cut is not known"),
        (["--columns", "text"], 2, "--columns text: expected KEY=NAME"),
        (["--columns", "{text: 3}"], 2, "--columns {text: 3}: expected KEY=NAME"),
        (["--columns", "text=a,text=b"], 2, "--columns text=a,text=b: expected KEY=NAME"),
        (["--columns", "text=body", "--columns", "text=a"], 2, "a key is repeated"),
        (["--seq-length", "5"], 2, "text is not cut when it is prepared"),
        (["--engine", "spark"], 2, "--engine spark is not known. Use local, ray, slurm-array."),
        (["--engine", "slurm-array"], 2, "Name their number, such as --tasks 16"),
        (["--tasks", "3"], 2, "--tasks is for --engine slurm-array"),
        (["--dry-run"], 2, "--dry-run is for --engine slurm-array"),
        (["--engine", "ray", "--workers", "2"], 2, "--workers is for processes of one machine"),
        (["--part", "3/3"], 2, "--part 3/3: expected I/N with I from 0 to N - 1"),
        (["--engine", "ray", "--part", "0/3"], 2, "Omit --engine ray"),
        (["--dedup", "near"], 2, "--dedup near is not known. Use exact, minhash."),
        (["--columns", "txt=body"], 2, "isthmus: --columns: txt is not a known field. Did you mean text"),
    ],
)
def test_invalid_options_are_errors(files, tokenizer, capsys, words, code, message):
    assert main(["prepare", files[0], files[-1], "--tokenizer", tokenizer, *(words if words[0] != "--seq-length" else ["--columns", "text=body", *words])]) == code  # fmt: skip  # noqa: E501
    assert message in capsys.readouterr().err
    assert not list(Path(files[-1]).parent.glob("out*"))


def test_a_missing_file_and_a_prefix_with_an_extension(files, tokenizer, capsys):
    assert main(["prepare", "none.jsonl", files[-1], "--tokenizer", tokenizer]) == 66
    assert main(["prepare", files[0], f"{files[-1]}.bin", "--tokenizer", tokenizer]) == 2
    assert "must be a prefix" in capsys.readouterr().err


def test_messages_name_options_in_place_of_settings():
    messages = {
        "Raise data.seq_length, or let data.overlong cut it.": "Raise --seq-length, or let --overlong cut it.",
        "data.on_error=skip leaves it out.": "--on-error skip leaves it out.",
        "set chat.split_turns=false (chat.template).": "set --no-split-turns (--chat-template).",
        "chats/data.columns, data.valid_fraction": "chats/data.columns, data.valid_fraction",
    }
    assert {text: _with_options(text) for text in messages} == messages


SBATCH = """#!/bin/bash
n=$(cat $SBATCH_JOBS/count 2>/dev/null || echo 0); n=$((n + 1)); echo $n > $SBATCH_JOBS/count
cat > $SBATCH_JOBS/$n.sh; echo "$@" > $SBATCH_JOBS/$n.options
if grep -q array= $SBATCH_JOBS/$n.sh; then
  export SLURM_ARRAY_TASK_ID=1; bash $SBATCH_JOBS/$n.sh > $SBATCH_JOBS/$n.log 2>&1  # task 0 fails
else
  bash $SBATCH_JOBS/$n.sh > $SBATCH_JOBS/$n.log 2>&1
fi
echo "$n;cluster"
"""


@pytest.mark.processes
@pytest.mark.thorough
def test_array_of_slurm(files, tokenizer, capsys, monkeypatch, tmp_path):
    """The scripts run as Slurm would run them, by a program in place of sbatch: one task of two, and the merge."""
    from isthmus.recipes.data import prepare_shards

    monkeypatch.setattr(prepare_shards, "SHARD_BYTES", 1)
    out = f"{files[-1]} 2"
    words = ["prepare", *files[:-1], out, "--tokenizer", tokenizer, "--on-error", "skip", "--engine", "slurm-array"]
    assert main([*words, "--tasks", "2", "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "#SBATCH --array=0-1" in printed and "--part $SLURM_ARRAY_TASK_ID/2" in printed
    assert not list(tmp_path.glob("out*"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert main([*words, "--tasks", "2"]) == 2
    assert "needs sbatch, which is not installed here" in capsys.readouterr().err
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text(SBATCH)
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("SBATCH_JOBS", str(tmp_path))
    assert main([*words, "--tasks", "2", "--workers", "1"]) == 0
    assert "submitted array job 1 of 2 tasks, and job 2, which merges" in capsys.readouterr().out
    assert (tmp_path / "2.options").read_text().split() == ["--parsable", "--dependency=afterany:1"]
    assert json.loads(Path(f"{out}.json").read_text())["report"]["records"] == 4
