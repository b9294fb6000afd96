"""``isthmus init``: what it sees in the data, what it proposes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli.main import main
from isthmus.config.load import load_config
from isthmus.errors import DataError, OutputExists, UsageError
from isthmus.hf.tiny_model import build_tiny_qwen3
from isthmus.recipes.model.model_source import tokenizer_at
from isthmus.tools.init.data_survey import DataSurvey, survey
from isthmus.tools.init.first_config import write_first_config
from isthmus.tools.init.run_file import data_settings, recipe_for
from isthmus.tools.planner.planned_gpus import parse_machine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init") / "model"
    build_tiny_qwen3(folder, ["the sea is salt and wide"], vocab_size=300)
    return folder


def chat(number: int, turns: int = 1) -> dict[str, Any]:
    messages = []
    for turn in range(turns):
        messages += [
            {"role": "user", "content": f"question {number} {turn}"},
            {"role": "assistant", "content": f"answer {number} " * (turn + 1)},
        ]
    return {"messages": messages}


def pair(number: int) -> dict[str, Any]:
    return {"prompt": f"question {number}", "chosen": f"yes {number}", "rejected": f"no {number}"}


def written(path: Path, records: list[Any]) -> str:
    path.write_text("".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records))
    return str(path)


def seen(model: Path, file: str, **options: Any) -> DataSurvey:
    return survey([file], tokenizer_at(str(model), None), **options)


def test_a_survey_counts_records_turns_duplicates_and_bad_lines(model: Path, tmp_path: Path) -> None:
    records = [*map(chat, range(20)), chat(3), chat(3), chat(50, turns=2), "{broken\n", pair(1)]
    result = seen(model, written(tmp_path / "chats.jsonl", records))
    assert (result.kind, result.records, result.is_complete) == ("chat", 25, True)
    assert (result.duplicates, result.bad, dict(result.turns)) == (2, 2, {2: 22, 4: 1})
    assert result.first_error is not None and "chats.jsonl:24" in result.first_error
    assert len(result.lengths) == 23 and result.length(1.0) == max(result.lengths)
    assert 0 < result.stats.loss_share < 1
    text = "\n".join(result.lines())
    assert "25 records: a chat record each" in text and "2 duplicates (8.0%)" in text and "4 in 1" in text


def test_the_first_records_of_large_data_are_read(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus.tools.init.data_survey.MOST_RECORDS", 5)
    result = seen(model, written(tmp_path / "chats.jsonl", [*map(chat, range(9))]))
    assert (result.records, result.is_complete) == (5, False)


@pytest.mark.parametrize(
    ("record", "recipe"),
    [({"text": "the sea"}, "pretrain"), (chat(1), "sft"), (pair(1), "dpo"), ({**chat(1), "label": True}, "kto")],
)
def test_the_recipe_fits_the_records(model: Path, tmp_path: Path, record: dict[str, Any], recipe: str) -> None:
    assert recipe_for(seen(model, written(tmp_path / "data.jsonl", [record] * 3)), None) == recipe


def test_a_goal_that_does_not_fit_the_records_is_refused(model: Path, tmp_path: Path) -> None:
    pairs = seen(model, written(tmp_path / "pairs.jsonl", [*map(pair, range(3))]))
    assert [recipe_for(pairs, goal) for goal in ("dpo", "kto", "reward")] == ["dpo", "kto", "reward"]
    with pytest.raises(UsageError, match=r"sft trains on a chat record, .* Use --recipe dpo"):
        recipe_for(pairs, "sft")
    with pytest.raises(UsageError, match="--recipe chat is unknown"):
        recipe_for(pairs, "chat")


def test_the_length_covers_99_percent_of_the_samples_within_the_positions(model: Path, tmp_path: Path) -> None:
    result = seen(model, written(tmp_path / "chats.jsonl", [*(chat(n, turns=1 + n % 9) for n in range(50))]))
    lengths = {setting.name: setting for setting in data_settings(result, positions=4096)}
    length = lengths["data.seq_length"].value
    assert length >= result.length(0.99) and length // 2 < max(128, result.length(0.99))
    short = {setting.name: setting for setting in data_settings(result, positions=64)}["data.seq_length"]
    assert short.value == 64 and short.reason is not None and "64 positions" in short.reason


def test_the_config_loads_and_says_why(model: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "chats.jsonl", [*map(chat, range(40)), "{broken\n"])
    path = tmp_path / "run.yaml"
    lines: list[str] = []
    config = write_first_config(
        path, model=str(model), data=[data], recipe=None, machine=None, words=["optim.lr=1e-3"], report=lines.append
    )
    assert config.command == f"isthmus sft {path}"
    run = load_config("sft", path, [], {"out": "o"})
    assert (run.optim.lr, run.data.on_error, run.train.epochs, run.data.files) == (1e-3, "skip", 3, (data,))
    text = path.read_text()
    assert "# 1 bad record, the first: " in text and "# as you gave it" in text and "41 records" in text
    assert any("steps" in line for line in lines), "the checks of --dry-run"
    json.dumps(config.as_dict())
    with pytest.raises(OutputExists, match="--out"):
        write_first_config(
            path, model=str(model), data=[data], recipe=None, machine=None, words=[], report=lines.append
        )


@pytest.mark.slow
def test_gpus_have_the_layout_of_the_planner_and_a_batch_for_the_data(model: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "pairs.jsonl", [*map(pair, range(200))])
    path = tmp_path / "run.yaml"
    machine = parse_machine("4xH100", None, None)
    config = write_first_config(
        path, model=str(model), data=[data], recipe="dpo", machine=machine, words=[], report=lambda line: None
    )
    settings = {setting.name: setting for setting in config.settings}
    assert settings["train.global_batch_size"].value == 8, "200 pairs are 25 steps of 8"
    assert "4 x H100" in (settings["parallel.tp"].reason or "") and config.command.endswith("--nproc 4")
    assert load_config("dpo", path, [], {"out": "o"}).parallel.tp == settings["parallel.tp"].value


@pytest.mark.slow
def test_a_small_model_has_the_learning_rate_of_small_models(model: Path, tmp_path: Path) -> None:
    data = written(tmp_path / "chats.jsonl", [*map(chat, range(9))])
    rates = {}
    for name, words in {"all": [], "adapters": ["lora.rank=4"], "pairs": []}.items():
        records = written(tmp_path / "pairs.jsonl", [*map(pair, range(9))]) if name == "pairs" else data
        path = tmp_path / f"{name}.yaml"
        config = write_first_config(
            path, model=str(model), data=[records], recipe=None, machine=None, words=words, report=lambda line: None
        )
        rates[name] = next((setting.value for setting in config.settings if setting.name == "optim.lr"), None)
    assert rates == {"all": 1e-3, "adapters": None, "pairs": None}


def test_adapters_are_proposed_where_all_weights_do_not_fit(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = written(tmp_path / "chats.jsonl", [*map(chat, range(9))])
    monkeypatch.setattr("isthmus.tools.init.layout.free_bytes", lambda: 1 << 20)
    path = tmp_path / "run.yaml"
    write_first_config(
        path, model=str(model), data=[data], recipe=None, machine=None, words=[], report=lambda line: None
    )
    assert load_config("sft", path, [], {"out": "o"}).lora.rank == 16


@pytest.mark.parametrize(
    ("records", "words", "error", "message"),
    [
        ([{"other": 1}], [], DataError, "no record of a known kind"),
        ([chat(1)], ["data.seq_lenght=5"], UsageError, "seq_length"),
        ([chat(1)], ["recipe=distill"], UsageError, "recipe"),
    ],
)
def test_bad_input_leaves_no_file(
    model: Path, tmp_path: Path, records: list[Any], words: list[str], error: type[Exception], message: str
) -> None:
    data = written(tmp_path / "data.jsonl", records)
    path = tmp_path / "run.yaml"
    with pytest.raises(error, match=message):
        write_first_config(
            path, model=str(model), data=[data], recipe=None, machine=None, words=words, report=lambda line: None
        )
    assert not path.exists() and not list(tmp_path.glob(".tmp*"))


def test_what_is_missing_is_named_without_a_terminal(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--data", "x.jsonl"]) == 2
    assert "--model is missing" in capsys.readouterr().err
    data = written(tmp_path / "chats.jsonl", [*map(chat, range(9))])
    words = ["init", "--model", str(model), "--data", data, "--out", str(tmp_path / "run.yaml")]
    assert main([*words, "--recipe", "distill"]) == 2
    assert "distill needs distill.teacher" in capsys.readouterr().err
