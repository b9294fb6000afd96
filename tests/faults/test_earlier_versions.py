"""This version reads what earlier versions wrote: the folders of tests/fixtures, one for each version."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from faults.command import rows
from faults.fork_server import ForkServer
from isthmus.config.load import dump, load_recorded
from isthmus.config.yaml_text import read_mapping
from isthmus.data.store.indexed_dataset import open_indexed

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
VERSIONS = sorted(path.parent.name for path in FIXTURES.glob("*/expected.json"))
WRITER: dict[str, Any] = runpy.run_path(str(FIXTURES / "write.py"))
IN_ANY_LAYOUT = 2e-5
"""Relative difference of a metric: one rank continues the runs of two, and torch may be another version."""
IN_FLOAT32 = 1e-6
"""Absolute difference of a metric that may be 0."""
EXPECTED: dict[str, dict[str, list[dict[str, float]]]] = {
    version: json.loads((FIXTURES / version / "expected.json").read_text())["metrics"] for version in VERSIONS
}
"""Version and name of a run -> the metrics with which the version continued it."""
OF_VERSIONS = pytest.mark.parametrize("version", VERSIONS)


def of_runs(*, short: tuple[str, ...] = ()) -> pytest.MarkDecorator:
    """A case for each run of each version; those of runs that are not in ``short`` are thorough."""
    cases = [
        pytest.param(version, name, id=f"{name}-{version}", marks=() if name in short else pytest.mark.thorough)
        for version, runs in EXPECTED.items()
        for name in runs
    ]
    return pytest.mark.parametrize(("version", "name"), cases)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The files of a version, unpacked once; tests that write copy them."""
    folders: dict[str, Path] = {}

    def unpack(version: str) -> Path:
        if version not in folders:
            folders[version] = tmp_path_factory.mktemp(version)
            with tarfile.open(FIXTURES / version / WRITER["ARCHIVE"]) as archive:
                archive.extractall(folders[version], filter="data")
        return folders[version]

    return unpack


@of_runs(short=("sft", "lora", "moe-fsdp", "dpo", "grpo"))
def test_a_run_continues(
    isthmus: ForkServer, files: Callable[[str], Path], version: str, name: str, tmp_path: Path
) -> None:
    """From its checkpoint, with optimizer state, in another layout: the metrics are those that the version recorded."""
    shutil.copytree(files(version), tmp_path, dirs_exist_ok=True)
    run = tmp_path / "runs" / name
    before = rows(run)
    done = isthmus(*WRITER["command"](name, WRITER["CONTINUED"], layout=False), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "reference: log-probabilities" not in done.stderr, "those of the run are read, not computed again"
    assert rows(run)[: len(before)] == before, "the rows of the earlier steps are kept"
    continued = WRITER["metrics"](run)[WRITER["STEPS"] :]
    for metrics, expected in zip(continued, EXPECTED[version][name], strict=True):
        assert metrics == pytest.approx(expected, rel=IN_ANY_LAYOUT, abs=IN_FLOAT32)
    first, *_ = [event for event in rows(run, "events.jsonl") if event["event"] == "resume"]
    assert first["step"] == WRITER["STEPS"]


@of_runs()
def test_commands_that_read_a_run(
    isthmus: ForkServer, files: Callable[[str], Path], version: str, name: str, tmp_path: Path
) -> None:
    """``convert`` writes its export again; ``config show``, ``data view`` and ``plan`` read its settings and data."""
    folder = files(version)
    run = folder / "runs" / name
    if not (run / "adapter").exists():  # a checkpoint of adapters has no base weights and is not converted
        assert isthmus("convert", run / "checkpoints", tmp_path / "hf", "--to", "hf").returncode == 0
        assert (tmp_path / "hf/model.safetensors").read_bytes() == (run / "hf/model.safetensors").read_bytes()
    config = run / "config.yaml"
    shown = isthmus("config", "show", config, "--resolved")
    assert shown.returncode == 0, shown.stderr
    recorded, now = read_mapping(config.read_text())[0], read_mapping(shown.stdout)[0]
    assert recorded.items() <= now.items()
    viewed = isthmus("data", "view", run, "--index", "0", cwd=folder)
    assert viewed.returncode == 0 and "ay the number" in viewed.stdout, viewed
    planned = isthmus("plan", config, "--gpus", "2xMI300X", "--json", cwd=folder)
    assert planned.result["recipe"] == now["recipe"] and planned.result["plans"], planned


@OF_VERSIONS
def test_configs_have_the_recorded_settings(version: str) -> None:
    """Settings that are new since have their defaults; a changed default fails here and belongs into the changelog."""
    configs = sorted(path for path in (FIXTURES / version / "configs").glob("*.yaml") if ".resolved" not in path.name)
    assert {path.stem for path in configs} == {"sft", "pretrain", "dpo", "kto", "reward", "distill", "grpo"}
    for path in configs:
        resolved = path.with_suffix(".resolved.yaml")
        config = load_recorded(path)
        assert load_recorded(resolved) == config, path.stem
        recorded, now = read_mapping(resolved.read_text())[0], read_mapping(dump(config))[0]
        for section, values in recorded.items():
            settings = values if isinstance(values, dict) else {"": values}
            for setting, value in settings.items():
                current = now[section][setting] if setting else now[section]
                assert current == value, (path.stem, section, setting)


@OF_VERSIONS
def test_prepared_data_is_read(files: Callable[[str], Path], version: str) -> None:
    for name, sequences in {"text": 24, "chats": 24, "pairs": 48}.items():
        data = open_indexed(files(version) / "prepared" / name, verify=True)
        assert len(data.lengths) == sequences, name


@OF_VERSIONS
def test_models_in_every_format_are_the_same(isthmus: ForkServer, files: Callable[[str], Path], version: str) -> None:
    folder = files(version)
    for checkpoint in ("torch_dist", "legacy"):
        assert isthmus("verify", folder / "model", folder / checkpoint, "--json").result["result"] == "identical"
    for run in ("sft", "moe-fsdp"):
        last = folder / "runs" / run / "checkpoints"
        assert isthmus("verify", folder / "runs" / run / "hf", last, "--json").result["result"] == "identical"


@OF_VERSIONS
def test_an_adapter_merges_to_the_export_of_its_run(
    isthmus: ForkServer, files: Callable[[str], Path], version: str, tmp_path: Path
) -> None:
    folder = files(version)
    adapter, merged = folder / "runs/lora/adapter", tmp_path / "merged"
    assert isthmus("merge", folder / "model", adapter, merged, "--json").returncode == 0
    expected, tensors = load_file(folder / "runs/lora/hf/model.safetensors"), load_file(merged / "model.safetensors")
    assert expected.keys() == tensors.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(tensors[name], tensor, rtol=1e-6, atol=1e-7)


@OF_VERSIONS
def test_reports_of_runs(isthmus: ForkServer, files: Callable[[str], Path], version: str, tmp_path: Path) -> None:
    runs = sorted((files(version) / "runs").iterdir())
    written = isthmus("report", *runs, "--out", tmp_path / "report.html", "--json", cwd=files(version)).result
    assert written["notes"] == []
    text = (tmp_path / "report.html").read_text()
    assert all(run.name in text for run in runs)


@OF_VERSIONS
def test_files_have_no_path_of_a_machine(files: Callable[[str], Path], version: str) -> None:
    """They are read anywhere: all paths in them are relative to the folder of the files."""
    texts = [path for path in files(version).rglob("*") if path.suffix in (".json", ".jsonl", ".yaml", ".md")]
    assert {"source.json", "config.yaml", "environment.json", "events.jsonl"} <= {path.name for path in texts}
    absolute = re.compile(r"""(?<=["'\s])/(?!dev/)[\w.-]+/""")
    assert {str(path): match[0] for path in texts if (match := absolute.search(path.read_text()))} == {}
