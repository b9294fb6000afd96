"""An earlier name keeps its meaning with a warning, and is later refused with the current one."""

from __future__ import annotations

import json
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest

import isthmus
from isthmus.cli.main import main
from isthmus.config import deprecated_names
from isthmus.config.deprecated_names import COMMANDS, METRICS, PYTHON, SETTINGS, DeprecatedName, Renamed, current_words
from isthmus.config.load import load_config, load_recorded
from isthmus.config.schema import RunConfig
from isthmus.errors import UsageError
from isthmus.recipes.plan.resume_check import changes
from isthmus.tools.report.run_history import METRICS as REPORTED

WARNS = {"since": "0.1.0", "refused_in": "99.0.0"}
REFUSES = {"since": "0.0.1", "refused_in": "0.1.0"}
CONFIG = "recipe: sft\nout: run\nmodel: model\ndata: {files: [chats.jsonl]}\noptim: {learning_rate: 0.5}\n"


@pytest.fixture(params=[WARNS, REFUSES], ids=["warns", "refuses"])
def versions(request: pytest.FixtureRequest) -> dict[str, str]:
    return dict(request.param)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def test_an_earlier_setting_has_its_meaning_and_a_warning(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "optim.learning_rate", Renamed("optim.lr", **WARNS))
    with pytest.warns(DeprecatedName) as caught:
        config = load_config("sft", file)
    assert config.optim.lr == 0.5
    (warning,) = [str(item.message) for item in caught]
    assert warning == (
        f"{file}:5:9  optim.learning_rate was renamed to optim.lr in version 0.1.0 and will be refused from version "
        "99.0.0 on; write optim.lr"
    )
    with pytest.warns(DeprecatedName, match="command line  optim.learning_rate was renamed"):
        assert load_config("sft", file, ["optim.learning_rate=0.25"]).optim.lr == 0.25
    file.write_text(CONFIG.replace("learning_rate: 0.5", "lr: 0.25, learning_rate: 0.5"))
    with pytest.raises(UsageError, match=r"optim.learning_rate and optim.lr are the same setting; leave out"):
        load_config("sft", file)


def test_a_later_version_refuses_it_and_still_reads_its_run_folders(
    file: Path, versions: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETTINGS, "optim.learning_rate", Renamed("optim.lr", **versions))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert load_recorded(file).optim.lr == 0.5
    if versions == REFUSES:
        with pytest.raises(
            UsageError, match=r":5:9  optim.learning_rate was renamed to optim.lr in .*; write optim.lr"
        ):
            load_config("sft", file)


def test_a_checkpoint_with_an_earlier_setting_is_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SETTINGS, "optim.learning_rate", Renamed("optim.lr", **REFUSES))
    config = RunConfig.model_validate({"recipe": "sft", "out": "run", "model": {"path": "m"}, "data": {"files": ["d"]}})
    settings = {
        f"{section}.{name}": value
        for section, values in json.loads(config.model_dump_json()).items() if isinstance(values, dict)
        for name, value in values.items()
    } | {"recipe": "sft"}  # fmt: skip
    same: dict[str, Any] = {
        "model": {"architecture": {}, "weights": "", "name": ""}, "teacher": None, "adapter": None,
        "tokenizer": {"vocabulary": "", "probe": "", "template": ""},
    }  # fmt: skip
    earlier = {name: value for name, value in settings.items() if name != "optim.lr"}
    saved = same | {"settings": earlier | {"optim.learning_rate": settings["optim.lr"]}}
    assert list(changes(saved, same | {"settings": settings})) == []
    (change,) = changes(saved, same | {"settings": settings | {"optim.lr": 1.0}})
    assert change.text == f"optim.lr {settings['optim.lr']} -> 1.0"


@pytest.mark.parametrize(
    ("earlier", "current", "words", "result"),
    [
        ("sft --steps-per-export", "sft --hf-every", "sft --steps-per-export 5", "sft --hf-every 5"),
        ("sft --steps-per-export", "sft --hf-every", "sft --steps-per-export=5 a=1", "sft --hf-every=5 a=1"),
        ("sft --steps-per-export", "sft --hf-every", "dpo --steps-per-export 5", None),
        ("run --nodes", "run --nproc", "run -- train.py --nodes 5", None),
        ("data show", "data view", "data show a.json", "data view a.json"),
        ("view", "data view", "view a.json", "data view a.json"),
    ],
)
def test_an_earlier_command_or_option(
    earlier: str,
    current: str,
    words: str,
    result: str | None,
    versions: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(COMMANDS, earlier, Renamed(current, **versions))
    if result is None:
        assert current_words(words.split()) == words.split()
    elif versions == WARNS:
        with pytest.warns(DeprecatedName, match=f"isthmus {earlier} was renamed to {current}"):
            assert current_words(words.split()) == result.split()
    else:
        with pytest.raises(UsageError, match=f"isthmus {earlier} was renamed to {current} .*; write {current}"):
            current_words(words.split())


def test_the_command_line_prints_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    monkeypatch.setitem(COMMANDS, "print-version", Renamed("version", **WARNS))
    assert main(["print-version"]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"isthmus {isthmus.__version__}\n"
    assert printed.err.split() == (
        "deprecated: isthmus print-version was renamed to version in version 0.1.0 and will be refused from version "
        "99.0.0 on; write version"
    ).split()  # fmt: skip


def test_an_earlier_python_name(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PYTHON, "LiveModel", Renamed("Callback", **versions))
    if versions == WARNS:
        with pytest.warns(DeprecatedName, match="isthmus.LiveModel was renamed to Callback"):
            assert isthmus.LiveModel is isthmus.Callback
    else:
        with pytest.raises(AttributeError, match=r"LiveModel was renamed to Callback in version 0\.0\.1; write"):
            _ = isthmus.LiveModel
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = isthmus.nothing


def test_reports_read_earlier_keys_of_metrics() -> None:
    assert REPORTED is METRICS and METRICS["learned_tokens"] == "loss_tokens"  # tests/unit/tools/report reads them


@pytest.mark.slow
def test_the_tables_lead_to_public_names_through_a_minor_version(repository: Path) -> None:
    public: dict[str, Any] = runpy.run_path(str(repository / "docs/public_names.py"))
    tables = {"settings": SETTINGS, "commands": COMMANDS, "python": PYTHON}
    for place, table in tables.items():
        names, prefix = public["present"]()[place], "isthmus." if place == "python" else ""
        for earlier, renamed in table.items():
            assert prefix + renamed.to in names, (earlier, renamed)
            since, refused = (deprecated_names._numbers(version) for version in (renamed.since, renamed.refused_in))
            assert since[:2] < refused[:2], f"{earlier}: at least one minor version warns before one refuses"
