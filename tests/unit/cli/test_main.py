from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from backports import zstd

import isthmus
from isthmus.cli import process, train_verbs
from isthmus.cli.main import main
from isthmus.config.schema import RunConfig
from isthmus.data.readers.data_names import COMPRESSED, FORMATS, HUB
from isthmus.data.readers.file_formats import chunk_records, read_chunks
from isthmus.data.readers.file_sources import is_data_file
from isthmus.data.store.manifest import SUFFIXES

SOURCE = Path(__file__).parents[3] / "src"
RUN = ["sft", "--model", "m", "--data", "d.json", "--out", "o"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "ISTHMUS_RANK_REPORTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(process, "run_folder", None)
    monkeypatch.setattr(train_verbs, "_check_data", lambda config: None)  # of files that do not exist
    monkeypatch.setattr("signal.signal", lambda number, handler: None)


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> list[RunConfig]:
    """Takes the place of the sft recipe and collects what it is called with."""
    calls: list[RunConfig] = []

    def run(config: RunConfig) -> Any:
        calls.append(config)
        values = {"loss": 1.25, "model": "o/hf", "valid_loss": None, "memory_gib": 0.41316, "tokens_per_s": 6665.81}
        return SimpleNamespace(as_dict=lambda: values, next_commands=lambda config: [f"isthmus chat {config.out}"])

    stand_in = ModuleType("isthmus.recipes.run")
    stand_in.run_recipe = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "isthmus.recipes.run", stand_in)
    return calls


def test_options_file_and_settings_reach_the_recipe(recipe: list[RunConfig], tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("optim: {lr: 3.0e-5}\ntrain: {steps: 7}\n")
    words = ["sft", str(file), "--data", "a", "b", "--model", "m", "--out", "o", "--hf-every", "5", "train.steps=9"]
    assert main(words) == 0
    (config,) = recipe
    assert config.recipe == "sft" and config.model.path == "m" and config.out == "o"
    assert config.data.files == ("a", "b") and config.checkpoint.hf_every == 5
    assert config.optim.lr == 3e-5 and config.train.steps == 9


def test_result_as_text_and_as_json(recipe: list[RunConfig], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(RUN) == 0
    printed = capsys.readouterr()
    assert printed.out.split("\n") == [
        "loss          1.25", "model         o/hf", "memory gib    0.41", "tokens per s  6,666", ""
    ]  # fmt: skip
    assert printed.err.endswith("next:\n  isthmus chat o\n")
    assert main([*RUN, "--json"]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["memory_gib"] == 0.41316 and "next:" not in printed.err


def test_dry_run_prints_the_first_error_and_the_config_only_as_json(
    recipe: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, "--dry-run", "--nproc", "4", "parallel.tp=4"]) == 66
    printed, errors = capsys.readouterr()
    assert not printed and not recipe and "isthmus: m does not exist" in errors and "4 ranks" in errors
    assert main([*RUN, "--dry-run", "--json"]) == 66
    assert json.loads(capsys.readouterr().out)["model"]["path"] == "m"


@pytest.mark.parametrize(
    ("words", "ranks"),
    [(["--gpus", "8xMI300X"], 8), (["--gpus", "16xMI300X"], 16), (["--gpus", "16xH100", "--nproc", "4"], 8)],
)
def test_dry_run_for_another_machine(
    words: list[str], ranks: int, recipe: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, "--dry-run", *words]) == 66
    assert f"  {ranks} ranks  " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpus", "8xH100"], "--gpus is for --dry-run"),
        (["--dry-run", "--gpus", "8"], "does not name a GPU. Give --gpus 8xH100"),
        (["--dry-run", "--gpus", "4xH100", "--nproc", "8"], "has 4. Use --nproc 4"),
        (["--dry-run", "--gpus", "8xH100", "platform=rocm"], "H100 is a GPU of cuda"),
    ],
)
def test_machines_that_are_refused(
    words: list[str], message: str, recipe: list[RunConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*RUN, *words]) == 2
    assert message in capsys.readouterr().err and not recipe


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["sft", "--ouut", "x"], "--out"),
        (["sfft"], "sft"),
        ([*RUN, "--nproc", "0"], "--nproc"),
        ([*RUN, "what"], "'what'"),
        ([*RUN, "optim.lrr=1"], "optim.lr"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_command_lines(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert hint in err and err.startswith("isthmus: ") and not out and "Traceback" not in err
    assert err.count("\n") == 1


def test_a_missing_config_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sft", "nowhere.yaml"]) == 66
    assert capsys.readouterr().err.count("\n") == 1


def test_ranks_of_another_launcher_do_not_start_more(
    recipe: list[RunConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(RUN) == 0 and len(recipe) == 1
    assert capsys.readouterr().out == ""  # only rank 0 prints
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    main([*RUN, "--nproc", "2"])
    assert codes == [2] and "--nproc 2" in capsys.readouterr().err


@pytest.mark.slow
def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"isthmus {isthmus.__version__}\n"
    for words in (["--help"], ["-h"]):
        assert main(words) == 0
        assert "pretrain" in capsys.readouterr().out
    assert main(["sft", "--help"]) == 0
    assert "--hf-every" in capsys.readouterr().out


def test_package_imports_its_functions_lazily() -> None:
    assert {"sft", "pretrain", "load_model", "AutoBridge", "register_family"} <= set(dir(isthmus))
    with pytest.raises(AttributeError):
        _ = isthmus.nothing  # type: ignore[attr-defined]


FAST = {"typer", "annotated_doc", "shellingham", "pydantic", "pydantic_core", "annotated_types"}
FAST |= {"typing_extensions", "typing_inspection"}
"""Packages of the start, which takes about 0.3 s of CPU time."""


@pytest.mark.processes
@pytest.mark.parametrize("words", [["--help"], ["--version"], ["sft", "--help"]])
def test_help_imports_few_packages(words: list[str]) -> None:
    code = f"import sys; before = set(sys.modules); from isthmus.cli.main import main; main({words})"
    code += "; print(*{name.partition('.')[0] for name in sys.modules.keys() - before}, file=sys.stderr)"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    imported = {name for name in done.stderr.split() if not name.startswith("_")}
    assert imported - sys.stdlib_module_names - FAST == {"isthmus"}


@pytest.mark.processes
def test_commands_that_do_not_import_torch() -> None:
    call = "main(['config', 'ls'])"
    code = f"import sys; from isthmus.cli.main import main; {call}; sys.exit('torch' in sys.modules)"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    assert subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True).returncode == 0


@pytest.mark.processes
def test_first_line_comes_before_torch(tmp_path: Path) -> None:
    """Importing torch takes seconds; here it fails."""
    main_only = f"import sys; sys.modules['torch'] = None; from isthmus.cli.main import main; main({RUN!r})"
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    (tmp_path / "d.json").write_text('{"prompt": "a", "completion": "b"}')
    words = [sys.executable, "-c", main_only]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert not done.stdout
    line, error = done.stderr.splitlines()
    assert line == f"isthmus {isthmus.__version__}  sft  model m  data d.json  1 epoch  1 rank  out o"
    assert error.startswith("isthmus: ") and "torch" in error


@pytest.mark.slow
def test_help_names_all_formats_of_data(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """And a file of each format is read."""
    assert main(["pretrain", "--help"]) == 0
    text = capsys.readouterr().out
    words = set(re.split(r"[\s;(),:]+", text))
    records = [{"text": "a"}, {"text": "b"}]
    texts = {"JSON": "\n".join(map(json.dumps, records)), "tables": "text\na\nb\n", "text": "a\n\nb\n"}
    for name, suffixes in FORMATS.items():
        for suffix in suffixes:
            assert suffix in words
            path = tmp_path / f"data{suffix}"
            if name == "parquet":
                pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
            else:
                path.write_text(texts[name])
            for file in (path, *(path.with_name(path.name + end) for end in COMPRESSED if name != "parquet")):
                if file != path:
                    assert file.suffix in words
                    file.write_bytes(compress(file.suffix, path.read_bytes()))
                assert is_data_file(file)
                values = [record.value for chunk in read_chunks([file]) for record in chunk_records(chunk)]
                assert values == ([{"text": texts["text"]}] if name == "text" else records), file
    assert {"save_to_disk", *SUFFIXES[:2]} <= words and f"{HUB}ORG/NAME[/CONFIGURATION][:SPLIT]" in "".join(
        text.split()
    )


def compress(suffix: str, content: bytes) -> bytes:
    return gzip.compress(content) if suffix in (".gz", ".gzip") else zstd.compress(content)


def test_invalid_rank_variables_end_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "abc")
    monkeypatch.setenv("RANK", "0")
    assert main(["config", "nosuch"]) == 2
    assert capsys.readouterr().err.count("isthmus: ") == 1


@pytest.mark.parametrize("command", ["pretrain", "convert"])
def test_password_of_a_model_is_hidden(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url, out = "https://user:pass-word@127.0.0.1:9/org/name", str(tmp_path / "out")
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    options = ["--model", url, "--data", str(tmp_path / "a.jsonl"), "--out", out, "train.steps=1"]
    assert main([command, *(options if command == "pretrain" else [url, out])]) == 66
    output = capsys.readouterr()
    assert "***@127.0.0.1:9/org/name does not exist" in output.err and "pass-word" not in output.err + output.out
