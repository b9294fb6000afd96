"""Each command in the pages about many machines has a test that runs it, and the table here names it.

Programs and names of clusters are replaced in those tests: ranks of a GPU by ranks on a CPU, and hosts by addresses of
this machine.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from isthmus.cli.main import parse_and_run

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "docs/how-to" / name for name in ("multi-node.md", "launch.md")]
PROGRAMS = ("isthmus", "torchrun", "srun", "scontrol", "kubectl", "ray", "pip", "export")
DRY_RUN = "unit/test_machine_pages.py::test_launch_commands_as_dry_runs"
SLURM = "faults/test_schedulers.py::test_slurm_requeues_a_preempted_job_which_resumes"
SPARE = "faults/test_schedulers.py::test_slurm_continues_on_a_spare_node"
SRUN = "faults/test_schedulers.py::test_srun_lines_of_the_page"
TORCHRUN = "faults/test_schedulers.py::test_torchrun_lines_of_the_page"
KUBERNETES = "faults/test_schedulers.py::test_kubectl_lines_of_the_page"
RAY = "faults/test_schedulers.py::test_ray_job_on_two_nodes_stops_and_resumes"
SSH = "faults/test_schedulers.py::test_two_hosts_over_ssh_stop_and_resume"
ELASTIC = "faults/test_elastic_agents.py::test_agents"
PLAN = "unit/test_machine_pages.py::test_plan_of_the_page"
DATA_AT_URLS = "unit/recipes/data/test_prepare_engines.py::test_s3"

TESTS: dict[str, tuple[str, ...]] = {
    "isthmus plan Qwen/Qwen3-32B": (PLAN,),
    "isthmus plan --nodes": (PLAN,),
    "srun --nodes=4 --ntasks-per-node=1 isthmus doctor": (SRUN,),
    "torchrun --nnodes 2 --nproc-per-node 1": (TORCHRUN,),
    "torchrun --nnodes 2 --nproc-per-node 8": (TORCHRUN,),
    "torchrun --nnodes 3:4 --max-restarts 10": (ELASTIC,),
    "isthmus prepare s3://": (DATA_AT_URLS,),
    "isthmus launch slurm": (DRY_RUN, SLURM, SPARE),
    "isthmus launch kubernetes": (DRY_RUN, KUBERNETES),
    "isthmus launch ray": (DRY_RUN, RAY),
    "isthmus launch ssh": (DRY_RUN, SSH),
    "isthmus launch": (DRY_RUN,),
    "export ISTHMUS_RUN_TOKEN": (SRUN,),
    "srun --nodes=2 --ntasks-per-node=8 isthmus sft": (SRUN,),
    "srun --kill-on-bad-exit=1": (SPARE,),
    "isthmus sft run.yaml": ("unit/test_machine_pages.py::test_the_run_of_the_page_on_this_machine",),
    "scontrol requeue": (SLURM,),
    "kubectl create secret": (KUBERNETES,),
    "kubectl apply": (KUBERNETES,),
    "pip install": ("unit/test_machine_pages.py::test_extras_of_the_page_exist",),
    "export RAY_API_SERVER_ADDRESS": (RAY,),
    "ray job stop": (RAY,),
    "ray job logs": (RAY,),
}
"""The tests of the commands that begin so; of several beginnings, the longest."""


def commands() -> Iterator[str]:
    """Lines of shell blocks, and commands within sentences, without comments."""
    for page in PAGES:
        text = page.read_text()
        for block in re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                if line.strip():
                    yield re.sub(r"\s+# .*", "", line)
        for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            if span.split()[0] in PROGRAMS and len(span.split()) > 1:
                yield " ".join(span.split())


def beginning(command: str) -> str | None:
    return max((key for key in TESTS if command.startswith(key)), key=len, default=None)


def test_every_command_has_its_test() -> None:
    beginnings = {command: beginning(command) for command in commands()}
    assert [command for command, key in beginnings.items() if key is None] == []
    assert set(beginnings.values()) == TESTS.keys()
    for test in {test for tests in TESTS.values() for test in tests}:
        file, _, name = test.partition("::")
        functions = ast.walk(ast.parse((ROOT / "tests" / file).read_text()))
        assert name in {node.name for node in functions if isinstance(node, ast.FunctionDef)}, test


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A ``run.yaml`` in the working folder, which is not in /tmp for the check of folders that machines share."""
    from isthmus.launch.engines import job

    (tmp_path / "chats.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
    path = tmp_path / "run.yaml"
    path.write_text("model: Qwen/Qwen3-0.6B\ndata: {files: [chats.jsonl]}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(job, "_LOCAL", ())
    for variable in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    return path


@pytest.mark.parametrize("engine", ["slurm", "kubernetes", "ray", "ssh"])
def test_launch_commands_as_dry_runs(engine: str, config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line for line in commands() if line.startswith(f"isthmus launch {engine} ")]
    assert len(lines) >= 2
    for line in lines:
        words = shlex.split(line)
        assert parse_and_run([*words[1:], "--dry-run"]) == 0
        text = capsys.readouterr().out
        command = shlex.join([*words[3:5], "--out", words[words.index("--out") + 1]])
        # Kubernetes has a list item for each word, Ray a JSON list.
        assert re.sub(r'["\s,\\-]+', " ", command) in re.sub(r'["\s,\\-]+', " ", text), text


@pytest.mark.thorough
def test_plan_of_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without network, with the preset of the model."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    lines = [line for line in commands() if line.startswith("isthmus plan ") and "--gpus" in line]
    assert lines
    for line in lines:
        assert parse_and_run(shlex.split(line)[1:]) == 0
        text = capsys.readouterr().out
        for part in ("  start ", "a checkpoint has ", "goodput", "to other nodes"):
            assert part in text, text


def test_the_run_of_the_page_on_this_machine(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its settings, which are checked without a model of the Hub."""
    from isthmus.cli import train_verbs

    lines = {line for line in commands() if line.startswith("isthmus sft ")}
    assert len(lines) == 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_verbs, "_check_only", lambda *_, **__: None)
        for line in lines:
            words = [word for word in shlex.split(line)[1:] if word != "..."]
            assert parse_and_run(words if "--dry-run" in words else [*words, "--dry-run"]) == 0


def test_extras_of_the_page_exist() -> None:
    table = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", table, re.MULTILINE))
    installed = [
        re.fullmatch(r"pip install 'isthmus\[(\w+)\]'", line) for line in commands() if line.startswith("pip ")
    ]
    assert installed and all(match is not None and match[1] in extras for match in installed)
