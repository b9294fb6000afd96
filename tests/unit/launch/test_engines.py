"""What ``isthmus launch --dry-run`` prints for each scheduler, what it refuses, and how it calls their programs."""

from __future__ import annotations

import re
import shlex
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ruamel.yaml import YAML

from isthmus.cli.main import parse_and_run
from isthmus.errors import IOFailure, MissingInput, UsageError
from isthmus.launch.engines import slurm

SFT = ["sft", "--model", "model", "--data", "a b.jsonl", "--out", "/shared/runs/a"]
MACHINES = ["--gpus", "8xMI300X", "launch.nodes=2"]
CONTAINER = ["launch.image=registry/isthmus:1", "launch.volumes.claim=/shared"]
Launch = Callable[..., str]


@pytest.fixture(autouse=True)
def working_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder outside of /tmp, which is refused."""
    monkeypatch.chdir("/")


@pytest.fixture
def rendered(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Launch:
    """The text that the dry run prints."""
    for variable in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(variable, raising=False)

    def render(engine: str, *words: str) -> str:
        assert parse_and_run(["launch", engine, *SFT, *words, "--dry-run"]) == 0
        return capsys.readouterr().out

    return render


def refusal(*words: str) -> str:
    with pytest.raises(UsageError) as error:
        parse_and_run(["launch", *words, "--dry-run"])
    return str(error.value)


def test_batch_script(rendered: Launch) -> None:
    text = rendered(
        "slurm", *MACHINES, "parallel.tp=8", "launch.spares=1", "launch.queue=gpu", "launch.secrets=HF_TOKEN",
        "launch.env.NCCL_DEBUG=WARN", "launch.options.time=08:00:00", "launch.options.cpus-per-task=12",
        "launch.options.exclusive=", "checkpoint.grace_s=100",
    )  # fmt: skip
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(.+))?$", text, re.MULTILINE))
    assert options == {
        "job-name": "isthmus-a", "nodes": "3", "ntasks-per-node": "8", "gpus-per-node": "8", "partition": "gpu",
        "no-kill": "", "chdir": "/", "signal": "TERM@160", "requeue": "", "open-mode": "append",
        "output": "%x-%j.log", "time": "08:00:00", "cpus-per-task": "12", "exclusive": "",
    }  # fmt: skip
    (srun,) = [shlex.split(line) for line in text.splitlines() if line.strip().startswith("srun ")]
    assert {"--nodes=2", "--ntasks=16", "--kill-on-bad-exit=1", "--cpus-per-task=12"} <= set(srun)
    run = srun[srun.index("isthmus") + 1 :]
    assert run == [
        "sft", "parallel.tp=8", "checkpoint.grace_s=100", "--model", "model", "--out", "/shared/runs/a", "--data",
        "a b.jsonl",
    ]  # fmt: skip
    assert "for attempt in 0 1; do" in text and ': "${HF_TOKEN:?' in text
    assert "export NCCL_DEBUG=WARN  # launch.env" in text
    assert re.search(r"^export NCCL_CROSS_NIC=0  # \w+", text, re.MULTILINE)  # of ROCm with several nodes


def test_an_elastic_run_uses_the_ranks_that_fit(rendered: Launch) -> None:
    hosts = ["launch.spares=1", "launch.hosts=[a,b,c]"]
    text = rendered("ssh", *MACHINES, *hosts, "parallel.pp=16", "parallel.elastic=true")
    assert "--nnodes=2:3" in text and "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in text
    without = rendered("ssh", *MACHINES, "launch.hosts=[a,b]")
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE" not in without


@pytest.mark.processes
def test_what_the_batch_script_does_with_exit_codes(rendered: Launch, tmp_path: Path) -> None:
    """With srun and scontrol that record their calls: 76 is tried again on a spare, 75 is queued again, 2 is final."""
    text = rendered("slurm", "--nproc", "2", "platform=cpu", "launch.spares=2")
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("srun", "scontrol"):
        (programs / name).write_text(
            f'#!/bin/bash\necho {name} $1 >> calls\n[ {name} = srun ] || exit 0\nread -r code < codes\n'
            'sed -i 1d codes\nexit "$code"\n'
        )  # fmt: skip
        (programs / name).chmod(0o700)
    outcomes = {"0": (0, 1, 0), "2": (2, 1, 0), "76\n0": (0, 2, 0), "76\n75": (75, 2, 1), "137\n76\n1\n0": (1, 3, 0)}
    for codes, (status, runs, requeues) in outcomes.items():
        (tmp_path / "codes").write_text(f"{codes}\n")
        (tmp_path / "calls").write_text("")
        variables = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
        done = subprocess.run(["bash"], input=text, text=True, cwd=tmp_path, env=variables, capture_output=True)
        calls = (tmp_path / "calls").read_text().splitlines()
        assert (done.returncode, calls.count("srun --nodes=1"), calls.count("scontrol requeue")) == (
            status, runs, requeues,
        ), (codes, done)  # fmt: skip


def test_containers_of_slurm(rendered: Launch) -> None:
    text = rendered("slurm", *MACHINES, "launch.image=registry/isthmus:1", "launch.volumes={/disk/me: /shared}")
    assert (
        "--container-image=registry/isthmus:1 --container-workdir=/shared --container-mounts=/disk/me:/shared" in text
    )
    assert " python -m isthmus sft " in text


@pytest.mark.parametrize("manifest", ["TrainJob", "JobSet"])
def test_manifest(rendered: Launch, manifest: str) -> None:
    settings = ["launch.secrets=HF_TOKEN", "launch.secret=hub", "launch.queue=team", "launch.env.A='$(B)'"]
    text = rendered("kubernetes", *MACHINES, *CONTAINER, *settings, "launch.spares=1", f"launch.manifest={manifest}")
    document: dict[str, Any] = YAML(typ="safe").load(text)
    assert document["kind"] == manifest
    assert document["metadata"] == {"name": "isthmus-a", "labels": {"kueue.x-k8s.io/queue-name": "team"}}
    spec = document["spec"]
    if manifest == "TrainJob":
        container, resources = spec["trainer"], spec["trainer"]["resourcesPerNode"]
        (job,) = spec["runtimePatches"][0]["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
        assert (container["numNodes"], container["numProcPerNode"]) == (3, 8)
        pod = job["template"]["spec"]["template"]["spec"]
    else:
        (job,) = spec["replicatedJobs"]
        batch = job["template"]["spec"]
        pod = batch["template"]["spec"]
        (container,) = pod["containers"]
        resources = container["resources"]
        assert batch["completions"] == batch["parallelism"] == 3 and spec["failurePolicy"]["maxRestarts"] == 1
    assert job["name"] == pod["containers"][0]["name"] == "node"
    assert container["image"] == "registry/isthmus:1" and resources == {"limits": {"amd.com/gpu": 8}}
    command = container["command"]
    assert command[:5] == ["env", "--chdir=/shared", "python", "-m", "torch.distributed.run"]
    assert {"--nnodes=2:3", "--nproc-per-node=8", "--max-restarts=1"} <= set(command)
    assert f"--rdzv-endpoint=isthmus-a-{job['name']}-0-0.isthmus-a:29500" in command
    environment = {item["name"]: item for item in container["env"]}
    assert environment["HF_TOKEN"]["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "HF_TOKEN"}}
    assert environment["A"]["value"] == "$$(B)"  # which Kubernetes does not expand
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "claim"}
    assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == "/shared"
    assert pod["terminationGracePeriodSeconds"] == 85


@pytest.mark.slow
@pytest.mark.parametrize("manifest", ["TrainJob", "JobSet"])
def test_manifest_has_the_fields_of_its_api(rendered: Launch, manifest: str) -> None:
    """The models of Kubeflow's package drop unknown fields."""
    reason = "pip install kubeflow-trainer-api, which has the models of the API"
    models: Any = pytest.importorskip("kubeflow_trainer_api.models", reason=reason)
    settings = ["launch.secrets=HF_TOKEN", "launch.secret=hub", "launch.queue=team", "launch.spares=1"]
    text = rendered("kubernetes", *MACHINES, *CONTAINER, *settings, f"launch.manifest={manifest}")
    document: dict[str, Any] = YAML(typ="safe").load(text)
    name = "TrainerV1alpha1TrainJob" if manifest == "TrainJob" else "JobsetV1alpha2JobSet"

    def plain(value: Any) -> Any:
        """Quantities are objects of the package."""
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return getattr(value, "actual_instance", value)

    def with_text_quantities(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: {n: str(q) for n, q in v.items()} if k == "limits" else with_text_quantities(v)
                for k, v in value.items()
            }
        return [with_text_quantities(item) for item in value] if isinstance(value, list) else value

    parsed = getattr(models, name).from_dict(with_text_quantities(document))
    assert plain(parsed.to_dict()) == with_text_quantities(document)


def test_scripts_of_ssh(rendered: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789abcdef")
    hosts = ["launch.hosts=[me@a,b]", "launch.options.Port=22022", "launch.secrets=HF_TOKEN"]
    text = rendered("ssh", *MACHINES, *hosts)
    assert "hf_0123456789abcdef" not in text and "IFS= read -r HF_TOKEN" in text
    first, second = text.split("\n\n")
    assert first.startswith("# me@a: ssh -T ") and " -o Port=22022 me@a\n" in first
    assert "--rdzv-endpoint=a:29500" in first and "--rdzv-endpoint=a:29500" in second
    assert "--local-addr=a --rdzv-conf=is_host=true" in first and "--local-addr=b --rdzv-conf=is_host=false" in second
    assert "--nnodes=2 " in first and "--max-restarts=0" in first


def test_job_of_ray(rendered: Launch) -> None:
    words = shlex.split(rendered("ray", *MACHINES, "launch.secrets=HF_TOKEN"))
    assert words[:3] == ["ray", "job", "submit"] and "isthmus.launch.engines.ray_driver" in words
    request = YAML(typ="safe").load(words[-1])
    assert request["machines"] == 2 and request["resources"] == {"GPU": 8} and request["secrets"] == ["HF_TOKEN"]
    assert "--rdzv-conf=is_host=true" in request["words"][0] and "--rdzv-conf=is_host=false" in request["words"][1]
    assert request["environment"]["NCCL_CROSS_NIC"] == "0"


@pytest.mark.processes
def test_programs_of_schedulers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["launch", "slurm", *SFT, *MACHINES, "launch.workdir=/shared"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingInput, match="sbatch is not installed on this machine"):
        parse_and_run(words)
    program = tmp_path / "sbatch"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(IOFailure, match="sbatch failed with exit code 1"):
        parse_and_run(words)
    program.write_text('#!/bin/sh\nwhile read -r line; do echo "$line"; done > job\n')
    assert parse_and_run(words) == 0
    assert (tmp_path / "job").read_text().startswith("#!/bin/bash\n")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(UsageError, match=r"launch\.secrets names HF_TOKEN, which this shell has not set"):
        parse_and_run([*words, "launch.secrets=HF_TOKEN"])


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["accelerate", *SFT], "needs a scheduler, slurm, kubernetes, ray, ssh, got accelerate"),
        (["slurm", "train.yaml"], "needs a recipe, sft, "),
        (["slurm", *SFT], "which GPUs do the machines have? Give --gpus"),
        (["slurm", *SFT[:-2], *MACHINES], "Name it with --out"),
        (["slurm", *SFT, "--gpus", "16xMI300X"], "Set launch.nodes=2"),
        (["slurm", *SFT, *MACHINES, "--nproc", "9"], "has 8. Leave --nproc out"),
        (["slurm", *SFT, *MACHINES, "platform=cuda"], "MI300X is a GPU of rocm"),
        (["slurm", *SFT, *MACHINES, "parallel.tp=3"], "do not divide the 16 ranks"),
        (["ssh", *SFT, *MACHINES, "launch.spares=1", "launch.hosts=[a,b,c]", "parallel.pp=16"], "do not divide the 24"),
        (["slurm", *SFT[:-1], "/tmp/a", *MACHINES], "out=/tmp/a is on another disk on each of the 2 machines"),
        (["slurm", *SFT, *MACHINES, "launch.workdir=/tmp/me"], "the working folder /tmp/me is on another disk"),
        (["slurm", *SFT, *MACHINES, "launch.options.nodes=3"], "launch.options has nodes, which launch.nodes"),
        (["slurm", *SFT, *MACHINES, "launch.hosts=a"], "launch.hosts is for ssh, got slurm. Leave it out."),
        (["ray", *SFT, *MACHINES, "launch.image=i"], "launch.image is for slurm and kubernetes, got ray"),
        (["slurm", *SFT, *MACHINES, "launch.volumes.a=/a"], "launch.image is not set"),
        (["kubernetes", *SFT, *MACHINES], "Set launch.image"),
        (["kubernetes", *SFT, *MACHINES, "launch.image=i"], "Set launch.volumes.CLAIM=/PATH"),
        (["kubernetes", *SFT, *MACHINES, "launch.image=i", "launch.volumes.a=/a"], "is in no volume of the container"),
        (["kubernetes", *SFT, *MACHINES, *CONTAINER, "launch.secrets=A"], "launch.secret names no Secret"),
        (["ssh", *SFT, *MACHINES, "launch.hosts=[a,a]"], "launch.hosts has 1 machines, and launch.nodes=2"),
        (["ssh", *SFT, *MACHINES, "launch.hosts=[a,-oProxyCommand=x]"], "would read as an option"),
        (["ssh", *SFT, *MACHINES, "launch.env.HF_TOKEN=x"], "HF_TOKEN looks like a secret"),
        (["ssh", *SFT, *MACHINES, "launch.env.A=hf_0123456789abcdef"], "A looks like a secret"),
        (["ssh", *SFT, *MACHINES, "launch.env.A=https://me:word@host"], "list it as launch.secrets=A"),
        (["ssh", *SFT, *MACHINES, "launch.env.A=1", "launch.secrets=A"], "leave it out of launch.env"),
        (["ssh", *SFT, *MACHINES, "launch.options={A: \"b\\nc\"}"], "launch.options.A"),
    ],
)  # fmt: skip
def test_refusals(words: list[str], reason: str) -> None:
    message = refusal(*words)
    assert reason in message and "hf_0123" not in message


def test_environment_without_secrets(rendered: Launch) -> None:
    """Words of names that only look alike."""
    text = rendered("slurm", *MACHINES, "launch.env={TOKENIZERS_PARALLELISM: 'false', N: 1}")
    assert "export TOKENIZERS_PARALLELISM=false" in text and "export N=1" in text


def test_final_exit_codes_of_the_batch_script() -> None:
    assert slurm._FINAL_CODES == (0, 2, 65, 66, 73, 75, 77, 79)
