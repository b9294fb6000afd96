"""The files of docs/examples are what their formats want, and the commands in them are ones that Isthmus takes."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from isthmus.cli import train_verbs
from isthmus.cli.main import parse_and_run

EXAMPLES = Path(__file__).resolve().parents[2] / "docs/examples"
SCRIPTS = ("slurm.sbatch", "torchrun.sh")
MANIFESTS = ("kubernetes.yaml", "skypilot.yaml")


def documents(name: str) -> list[Any]:
    return list(YAML(typ="safe").load_all((EXAMPLES / name).read_text()))


def shell_text(name: str) -> str:
    """What a shell runs."""
    if name in SCRIPTS:
        return (EXAMPLES / name).read_text()
    *_, last = documents(name)
    text: str = last["run"] if "run" in last else last["spec"]["template"]["spec"]["containers"][0]["args"][0]
    return text


def test_every_example_is_tested() -> None:
    assert {path.name for path in EXAMPLES.iterdir()} == {*SCRIPTS, *MANIFESTS, "sft.yaml"}


@pytest.mark.processes
@pytest.mark.parametrize("name", [*SCRIPTS, *MANIFESTS])
def test_shell_is_shell_and_the_command_is_one(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shell_text(name)
    done = subprocess.run(["bash", "-n"], input=text, text=True, capture_output=True)
    assert done.returncode == 0 and not done.stderr, done.stderr
    lines = re.sub(r"\\\n\s*", "", text).splitlines()
    (line,) = [line for line in lines if re.match(r"(exec torchrun|srun|isthmus)\b", line.strip())]
    words = shlex.split(line)
    if "torchrun" in words:
        flags = set(words[: words.index("-m")])
        assert {"--nnodes", "--nproc-per-node", "--node-rank", "--master-addr", "--master-port"} <= flags
    words = words[words.index("isthmus") + 1 :]
    monkeypatch.chdir(EXAMPLES)
    for variable in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(train_verbs, "_check_only", lambda *_, **__: None)  # of models of the user
    assert parse_and_run([*words, "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parallel"]["tp"] == 8


def test_the_job_gives_its_first_pod_the_name_that_it_uses() -> None:
    service, job = documents("kubernetes.yaml")
    pod = job["spec"]["template"]["spec"]
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["completions"] == job["spec"]["parallelism"] == 2
    assert service["spec"]["clusterIP"] == "None" and pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert f"--master-addr {job['metadata']['name']}-0.{pod['subdomain']} " in pod["containers"][0]["args"][0]
    assert f"--nnodes {job['spec']['completions']} " in pod["containers"][0]["args"][0]


def test_the_tasks_of_the_batch_script_are_its_ranks() -> None:
    text = (EXAMPLES / "slurm.sbatch").read_text()
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)=(\S+)$", text, re.MULTILINE))
    assert options["ntasks-per-node"] == options["gpus-per-node"] == "8" and options["signal"].startswith("TERM@")
