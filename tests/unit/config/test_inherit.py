"""Config files that build on others, and take values from the environment."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from isthmus.cli import train_verbs
from isthmus.cli.main import main
from isthmus.config.load import load_config, load_settings, origins_of
from isthmus.config.presets import config_path, opening_lines, preset_names
from isthmus.errors import MissingInput, UsageError
from sweep import swept

BASE = "model: {path: m}\ndata: {files: [a.json]}\nout: o\noptim: {lr: 1e-5, clip_grad: 0.5}\n"


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_config("sft", path, overrides)
    return str(caught.value).replace(f"{path.parent}/", "")


@pytest.mark.parametrize("word", ["bases", "extends"])
def test_later_bases_win_over_earlier_ones_and_the_file_over_bases(word: str, tmp_path: Path) -> None:
    write(tmp_path / "deep/first.yaml", BASE + "train: {seed: 1, steps: 10}\n")
    write(tmp_path / "deep/second.yaml", "bases: first.yaml\ntrain: {seed: 2}\n")
    write(tmp_path / "third.yaml", "optim: {lr: 3e-5}\ntrain: {seed: 3}\n")
    mine = f"{word}: [deep/second.yaml, third.yaml]\ntrain:\n  micro_batch_size: 2\n"
    config = load_config("sft", write(tmp_path / "mine.yaml", mine), ["train.steps=20"])
    assert (config.train.seed, config.train.steps, config.train.micro_batch_size) == (3, 20, 2)
    assert (config.optim.lr, config.optim.clip_grad) == (3e-5, 0.5)


def test_overrides_win_over_the_rest_of_the_file(tmp_path: Path) -> None:
    text = "overrides:\n  optim: {lr: 4e-5}\n" + BASE
    assert load_config("sft", write(tmp_path / "mine.yaml", text)).optim.lr == 4e-5
    below = write(tmp_path / "below.yaml", "bases: [mine.yaml]\noptim: {lr: 5e-5}\n")
    assert load_config("sft", below).optim.lr == 5e-5


@pytest.mark.parametrize("name", ["qwen3-0.6b-sft", "llama3.2-1b-sft"])
def test_steps_replace_epochs_of_a_base_and_the_reverse(name: str, tmp_path: Path) -> None:
    here = config_path(f"preset:{name}", "train")
    flags = {"data": ["a.json"], "out": "o"}
    assert load_config("sft", here, ["train.steps=6"], flags).train.steps == 6
    preset = load_config("sft", here, ["train.epochs=2"], flags).train
    assert (preset.steps, preset.epochs) == (None, 2.0)
    mine = write(tmp_path / "mine.yaml", f"bases: [preset:{name}]\ntrain: {{epochs: 3}}\n")
    assert load_config("sft", mine, [], flags).train.epochs == 3.0
    below = write(tmp_path / "below.yaml", "bases: [mine.yaml]\ntrain: {steps: 7}\n")
    loaded = load_settings("sft", below, ["train.micro_batch_size=1"], flags)
    assert loaded.config is not None and loaded.config.train.steps == 7
    assert ("train", "epochs") not in loaded.origins
    assert "got steps=7 and epochs=4; keep one" in refusal(
        write(tmp_path / "both.yaml", BASE + "train: {steps: 7, epochs: 4}\n")
    )


def test_other_data_replace_those_of_a_base(tmp_path: Path) -> None:
    base = write(tmp_path / "base.yaml", BASE)
    mixed = load_config("sft", base, ["data.sets.web.files=[w.json]", "data.sets.books.files=[b.json]"])
    assert set(mixed.data.sets) == {"web", "books"} and not mixed.data.files
    assert load_config("sft", base, ["data.mock=true", "train.steps=1"]).data.mock
    assert load_config("sft", base, ["data.mock=false"]).data.files == ("a.json",)
    mock = write(tmp_path / "mock.yaml", "bases: [base.yaml]\ndata: {mock: true}\ntrain: {steps: 1}\n")
    assert load_config("sft", mock, [], {"data": ["c.json"]}).data.files == ("c.json",)


def test_every_setting_has_its_origin(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", BASE)
    mine = write(tmp_path / "mine.yaml", "bases: [base.yaml]\noverrides:\n  train:\n    seed: 7\n")
    loaded = load_settings("sft", mine, ["parallel.tp=2"])
    assert loaded.config is not None
    rows = list(origins_of(loaded.config.model_dump(mode="json"), loaded.origins))
    origins = {name: (value, where.replace(f"{tmp_path}/", "")) for name, value, where in rows}
    assert origins["optim.lr"] == (1e-5, "base.yaml:4:9") and origins["train.seed"] == (7, "mine.yaml:4:5")
    assert origins["parallel.tp"] == (2, "command line") and origins["parallel.pp"] == (1, "default")


def test_errors_in_a_base_name_its_line(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", BASE + "trian: {seed: 1}\n")
    mine = write(tmp_path / "mine.yaml", "bases: [base.yaml]\nparallel: {tpp: 2}\n")
    message = refusal(mine)
    assert "base.yaml:5:1  trian  is not a setting (did you mean train?)" in message
    assert "mine.yaml:2:12  parallel.tpp" in message


def test_an_error_about_a_preset_names_the_file_that_lists_it(tmp_path: Path) -> None:
    """With the key, and nothing of this package."""
    text = "bases: [preset:llama3.2-1b-sft]\nmodel: {path: m}\ndata: {files: [a.json]}\nout: o\n"
    message = refusal(write(tmp_path / "mine.yaml", text + "optim: {schedule: constant, schedule_steps: 3}\n"))
    assert message.startswith("mine.yaml:5:") and "presets" not in message
    message = refusal(write(tmp_path / "mine.yaml", text), "train.global_batch_size=7", "train.micro_batch_size=2")
    assert message.startswith("command line  train.global_batch_size")
    message = refusal(write(tmp_path / "mine.yaml", text.replace("llama3.2-1b-sft", "deepseek-v3-lora")), "lora.rank=0")
    assert message.startswith("command line  lora.rank")
    message = refusal(tmp_path / "mine.yaml", "train.recompute=none", "train.recompute_layers=2", "train.steps=2")
    assert message.startswith("command line  train.recompute_layers")
    dora = write(tmp_path / "mine.yaml", text.replace("llama3.2-1b-sft", "deepseek-v3-lora") + "lora: {path: a}\n")
    assert "\n  mine.yaml:1:1  bases  preset:deepseek-v3-lora  lora.rank  rank is that of" in refusal(dora)
    other = write(tmp_path / "mine.yaml", text.replace("llama3.2-1b-sft", "llama3.1-8b-fp8-benchmark"))
    based = "mine.yaml:1:1  bases  preset:llama3.1-8b-fp8-benchmark  recipe  is 'pretrain', but the command is sft;"
    assert refusal(other) == f"{based} use the command of that recipe"  # not the preset that this one is based on
    alone = refusal(config_path("preset:llama3.2-1b-sft"), "out=o")
    assert alone.startswith("preset:llama3.2-1b-sft  data.files  is missing") and "presets/" not in alone
    message = refusal(write(tmp_path / "mine.yaml", "out: o\nbases:\n- preset:lama3.2-1b-sft\n"))
    assert message.startswith("mine.yaml:2:1  bases  there is no preset 'lama3.2-1b-sft'. Did you mean preset:llama3.2")


def test_an_unknown_model_preset_has_the_three_nearest_names() -> None:
    with pytest.raises(UsageError) as caught:
        load_config("sft", None, ["model=preset:qwen3-0.7b", "data.files=[a]", "out=o"])
    message = str(caught.value)
    assert message.startswith("command line  model.path  there is no preset 'qwen3-0.7b'. Did you mean preset:qwen3-")
    assert "preset:qwen3-0.6b" in message
    assert message.count("preset:") == 3 and "docs/reference/presets.md" in message
    assert "\n" not in message


@pytest.mark.slow
def test_presets_are_searched_by_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "ls", "LORA", "qwen3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run configs" and len(lines) > 1
    assert all("lora" in line.lower() and "qwen3" in line.lower() for line in lines[1:])
    assert main(["config", "ls", "qwen9"]) == 2
    printed, error = capsys.readouterr()
    assert not printed and error.startswith("isthmus: no preset matches qwen9. Did you mean preset:qwen")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("bases: [other.yaml]\n", "cycle: {0}mine.yaml -> {0}other.yaml -> {0}mine.yaml"),
        ("bases: [absent.yaml]\n", "no such base file ({0}mine.yaml -> {0}absent.yaml)"),
        ("bases: {a: 1}\n", "must be a list of files"),
        ("bases: [a.yaml]\nextends: [b.yaml]\n", "both bases and extends"),
        ("bases: [preset:qwen3-sft]\n", "there is no preset 'qwen3-sft'"),
        ("overrides: 3\n", "mine.yaml:1:1  overrides  must be a mapping"),
    ],
)
def test_invalid_bases(text: str, part: str, tmp_path: Path) -> None:
    write(tmp_path / "other.yaml", "bases: [mine.yaml]\n")
    assert part.format("") in refusal(write(tmp_path / "mine.yaml", text))


def test_syntax_errors_name_the_expected_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = refusal(write(tmp_path / "a.yaml", BASE + "train.seed: 3\n"))
    assert "train.seed  is not a key; in a file write `train: {seed: ...}`" in flat
    assert "in quotes" in refusal(write(tmp_path / "b.yaml", "optim: {lr: ${LR}}\n"))
    write(tmp_path / "sub/base.yaml", BASE)
    config = write(tmp_path / "c.yaml", 'bases: ["${WHERE}/base.yaml"]\n')
    assert "WHERE is not set" in refusal(config)
    monkeypatch.setenv("WHERE", "sub")
    assert load_config("sft", config).optim.lr == 1e-5


def test_missing_file_and_missing_base(tmp_path: Path) -> None:
    with pytest.raises(MissingInput, match=r"absent\.yaml: there is no such config file"):
        load_config("sft", tmp_path / "absent.yaml")


def test_values_of_variables_are_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = BASE + 'train:\n  steps: "${STEPS:30}"\n  seed: ${SEED}\nparallel:\n  sp: ${SP:null}\n'
    path = write(tmp_path / "mine.yaml", text.replace("path: m", 'path: "${HOME_OF_MODELS:models}/${MODEL:7}"'))
    monkeypatch.setenv("SEED", "5")
    monkeypatch.setenv("MODEL", "2026-11-21")
    config = load_config("sft", path)
    values: tuple[Any, ...] = (config.train.steps, config.train.seed, config.parallel.sp, config.model.path)
    assert values == (30, 5, None, "models/2026-11-21")
    monkeypatch.delenv("SEED")
    assert "mine.yaml:7:3  train.seed  SEED is not set; set it, or give a default: ${SEED:...}" in refusal(path)


@pytest.mark.parametrize("name", swept(preset_names(), ("llama3.2-1b-sft", "qwen3-30b-a3b-sft")))
def test_the_first_command_of_a_preset_is_valid(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(train_verbs, "_check_only", lambda *_, **__: None)  # of models on the Hub
    command = next(line for line in opening_lines(config_path(f"preset:{name}")) if line.startswith("isthmus "))
    words = command.split()[1:]
    assert f"preset:{name}" in words
    assert main([*words, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["recipe"] == words[0]


@pytest.mark.slow
def test_config_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["config", "ls"]) == 0
    listed = [line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines()]
    assert any(row[0] == "preset:llama3.2-1b-sft" and row[1].startswith("Fine-tune Llama-3.2-1B") for row in listed)
    assert main(["config", "cp", "llama3.2-1b-sft", "mine.yaml"]) == 0
    assert main(["config", "cp", "llama3.2-1b-sft", "mine.yaml"]) == 73
    assert main(["config", "show", "mine.yaml", "optim.lr=1e-3"]) == 0
    assert "lr: 0.001" in capsys.readouterr().out
    words = ["mine.yaml", "model.path=m", "data.files=[x]", "out=o"]
    assert main(["config", "show", *words, "--resolved", "--origin"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["train.global_batch_size", "128", "mine.yaml:14:3"] in lines and ["parallel.tp", "1", "default"] in lines
    assert main(["config", "show", "mine.yaml", "--resolved"]) == 2  # no model
    assert main(["config", "show", "mine.yaml", "--recipe", "sft"]) == 2


@pytest.mark.slow
def test_the_json_schema_has_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert {"bases", "extends", "overrides", "model", "train"} <= schema["properties"].keys()
    optim = schema["$defs"]["OptimConfig"]
    # The JSON schema accepts what a file may contain.
    variable = {"type": "string", "pattern": r"\$\{"}
    assert variable in optim["properties"]["eps"]["anyOf"] and optim["properties"]["eps"]["default"] == 1e-8
    assert "default" not in optim["properties"]["lr"]  # it depends on the recipe
    assert {"type": "string"} in schema["$defs"]["DataConfig"]["properties"]["files"]["anyOf"]
    types = schema["$defs"]["CheckpointConfig"]["properties"]["every"]["anyOf"]
    assert {"type": "integer", "minimum": 0, "maximum": 2**31 - 1} in types
    assert optim["additionalProperties"] is False
    assert optim["properties"]["lr"]["description"].startswith("Peak learning rate.")
