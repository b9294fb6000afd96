"""``isthmus launch`` on real schedulers: the same losses as on one machine, also after an interruption."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from faults.command import CompletedCommand, environment, rows, wait_for_step
from faults.kubernetes_api import kubernetes_api
from faults.ray_cluster import ray_cluster
from faults.schedulers import slurm_cluster, ssh_server, wait_for
from free_port import free_port

pytestmark = pytest.mark.thorough
SETTINGS = "data.seq_length=64 train.global_batch_size=4 optim.lr=1e-3 platform=cpu".split()


@pytest.fixture
def shared() -> Iterator[Path]:
    """A folder outside of /tmp, which is refused as the run folder of several machines."""
    folder = Path(tempfile.mkdtemp(prefix="isthmus-shared-", dir=Path.home()))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def daemons() -> Iterator[Path]:
    """A folder with a short name, for sockets."""
    folder = Path(tempfile.mkdtemp(prefix="isthmus-"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def command(model: Path, chats: Path) -> list[str]:
    return ["sft", "--model", str(model), "--data", str(chats), *SETTINGS]


def isthmus_words(*words: str) -> list[str]:
    return [sys.executable, "-m", "isthmus", *words]


def page_block(page: str, start: str) -> str:
    """The block of shell lines of a page that begins with ``start``."""
    text = (Path(__file__).parents[2] / "docs/how-to" / page).read_text()
    (block,) = [block for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) if block.startswith(start)]
    return str(block)


def page_line(page: str, start: str) -> str:
    text = (Path(__file__).parents[2] / "docs/how-to" / page).read_text()
    (line,) = [line for line in text.splitlines() if line.startswith(start)]
    return re.sub(r"\s+# .*", "", line)


def with_programs() -> dict[str, str]:
    """The programs of this interpreter's environment come first."""
    return {"PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}


def run_yaml(command: list[str], folder: Path) -> None:
    """Write the config of a run of two steps on a CPU to ``sft.yaml``."""
    (folder / "sft.yaml").write_text(
        f"model: {command[2]}\ndata: {{files: [{command[4]}], seq_length: 64}}\nout: {folder}/out\n"
        "train: {steps: 2, global_batch_size: 4}\noptim: {lr: 1.0e-3}\nplatform: cpu\n"
    )


def run(words: list[str], cwd: Path, variables: dict[str, str], timeout_s: float = 500.0) -> CompletedCommand:
    done = subprocess.run(
        words, cwd=cwd, env=environment() | variables, capture_output=True, text=True, timeout=timeout_s
    )
    return CompletedCommand(done.returncode, done.stdout, done.stderr)


def losses(out: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in rows(out) if "loss" in row}


def reference(command: list[str], shared: Path) -> dict[int, float]:
    """The losses of two ranks of one machine."""
    done = run(isthmus_words(*command, "--nproc", "2", "--out", str(shared / "reference")), shared, {})
    assert done.returncode == 0, done
    return losses(shared / "reference")


def slurm_settings() -> list[str]:
    """Settings of jobs whose nodes have no host names, and share their ports with other clusters."""
    return ["launch.name=run", "launch.env.MASTER_ADDR=127.0.0.1", f"launch.env.MASTER_PORT={free_port()}"]


def test_slurm_requeues_a_preempted_job_which_resumes(command: list[str], shared: Path, daemons: Path) -> None:
    command += ["train.steps=60", "train.eval_every=0"]
    out = shared / "out"
    words = isthmus_words("launch", "slurm", *command, "--out", str(out), "launch.nodes=2", *slurm_settings())
    try:
        with slurm_cluster(daemons, nodes=2) as variables:
            done = run(words, shared, variables)
            assert done.returncode == 0, done
            job = done.stdout.split()[-1]
            wait_for_step(out, 3)
            other = run(["srun", "--partition=high", "--nodes=2", "--ntasks=4", "true"], shared, variables)
            assert other.returncode == 0, other

            def show() -> str:
                return run(["scontrol", "show", "job", job], shared, variables).stdout

            assert "JobState=PENDING" in show() and "Restarts=1" in show()
            # Slurm waits two minutes; in less than a second the nodes refuse the credential of the job.
            run(["scontrol", "update", f"JobId={job}", "StartTime=now+4"], shared, variables)
            wait_for(lambda: re.search("JobState=(COMPLETED|FAILED)", show()) is not None, "the end of the job")
            assert "JobState=COMPLETED" in show(), show()
    except PermissionError as reason:
        pytest.skip(f"no Slurm: {reason}")
    log = (shared / f"run-{job}.log").read_text()
    assert len(re.findall(r"stopped after step \d+ of 60 as requested", log)) == 1 and "resumed from " in log
    assert losses(out) == reference(command, shared)


def test_slurm_continues_on_a_spare_node(command: list[str], shared: Path, daemons: Path) -> None:
    command += ["train.steps=60", "train.eval_every=0", "checkpoint.every=5"]
    out = shared / "out"
    launch = ["launch.nodes=2", "launch.spares=1", *slurm_settings()]
    try:
        with slurm_cluster(daemons, nodes=3) as variables:
            done = run(isthmus_words("launch", "slurm", *command, "--out", str(out), *launch), shared, variables)
            assert done.returncode == 0, done
            job = done.stdout.split()[-1]
            wait_for_step(out, 11)
            ranks = [rank for rank in psutil.process_iter(["cmdline"]) if str(out) in (rank.info["cmdline"] or ())]
            (lost,) = [
                rank for rank in ranks if rank.environ().get("SLURM_PROCID") == "1" and "srun" not in rank.name()
            ]
            node = lost.environ()["SLURMD_NODENAME"]
            slurmd = psutil.Process(int((daemons / f"{node}.pid").read_text()))
            for process in (slurmd, lost.parent(), lost):  # as if the node were without power
                assert process is not None
                process.send_signal(signal.SIGKILL)
            wait_for(lambda: "exported " in (shared / f"run-{job}.log").read_text(), "the end of the job")
    except PermissionError as reason:
        pytest.skip(f"no Slurm: {reason}")
    assert "resumed from " in (shared / f"run-{job}.log").read_text()
    assert losses(out) == reference(command, shared)


def start_over_ssh(words: list[str], cwd: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        words, cwd=cwd, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    )  # fmt: skip


def ssh_words(command: list[str], out: Path, settings: list[str]) -> list[str]:
    hosts = ["launch.hosts=[127.0.0.1,127.0.0.2]", f"launch.port={free_port()}", *settings]
    hosts += [f"launch.env.{name}={environment()[name]}" for name in ("PYTHONPATH", "OMP_NUM_THREADS")]
    return isthmus_words("launch", "ssh", *command, "--out", str(out), *hosts)


def test_two_hosts_over_ssh_stop_and_resume(command: list[str], shared: Path, daemons: Path) -> None:
    command += ["train.steps=60", "train.eval_every=0"]
    out = shared / "out"
    try:
        with ssh_server(daemons) as settings:
            words = [*ssh_words(command, out, settings), "launch.nodes=2"]
            first = start_over_ssh(words, shared)
            wait_for_step(out, 3)
            first.send_signal(signal.SIGINT)
            output = first.communicate(timeout=90)[0]
            assert first.returncode == 75 and "stopped, as requested" in output, output
            assert max(losses(out)) < 60
            second = start_over_ssh(words, shared)
            output = second.communicate(timeout=400)[0]
            assert second.returncode == 0 and "resumed from " in output, output
    except FileNotFoundError as reason:
        pytest.skip(f"no ssh: {reason}")
    assert losses(out) == reference(command, shared)


def test_lost_host_with_a_spare(command: list[str], shared: Path, daemons: Path) -> None:
    """torchrun restarts the ranks on the host that is left."""
    command += ["train.steps=60", "train.eval_every=0", "checkpoint.every=5"]
    out = shared / "out"
    try:
        with ssh_server(daemons) as settings:
            launch = start_over_ssh([*ssh_words(command, out, settings), "launch.spares=1"], shared)
            wait_for_step(out, 11)
            for agent in psutil.process_iter(["cmdline"]):
                words = agent.info["cmdline"] or ()
                if "--local-addr=127.0.0.2" in words and str(out) in words:
                    for process in [*agent.children(recursive=True), agent]:
                        process.send_signal(signal.SIGKILL)
            output = launch.communicate(timeout=400)[0]
    except FileNotFoundError as reason:
        pytest.skip(f"no ssh: {reason}")
    assert launch.returncode == 0 and " 1 rank " in output and "resumed from " in output, output
    assert max(losses(out)) == 60


_STOP_JOB = """
import sys
from ray.job_submission import JobSubmissionClient
client = JobSubmissionClient(sys.argv[1])
client.stop_job(input())
"""
"""Started before the job, since the imports take longer than the training."""


def test_ray_job_on_two_nodes_stops_and_resumes(command: list[str], shared: Path, daemons: Path) -> None:
    command += ["train.steps=100", "train.eval_every=0"]
    out = shared / "out"
    settings = ["launch.nodes=2", f"launch.port={free_port()}", "launch.secrets=ISTHMUS_TEST_SECRET"]
    words = isthmus_words("launch", "ray", *command, "--out", str(out), *settings)
    try:
        with ray_cluster(daemons, cpus=1, ISTHMUS_TEST_SECRET="of the cluster") as variables:
            client = subprocess.Popen(
                [sys.executable, "-c", _STOP_JOB, variables["RAY_API_SERVER_ADDRESS"]],
                env=environment() | variables, stdin=subprocess.PIPE, text=True,
            )  # fmt: skip

            def submit() -> str:
                done = run(words, shared, variables)
                assert done.returncode == 0, done
                match = re.search(r"raysubmit_\w+", done.stdout)
                assert match is not None
                return match[0]

            def log_of(job: str) -> str:
                return run(["ray", "job", "logs", "--follow", job], shared, variables).stdout

            first = submit()
            wait_for_step(out, 3)
            client.communicate(first, timeout=60)
            assert client.returncode == 0
            log = log_of(first)
            assert "stopped, as requested" in log and max(losses(out)) < 100, log
            log = log_of(submit())
            assert "succeeded" in log and "resumed from " in log, log
            assert "of the cluster" not in log
    except FileNotFoundError as reason:
        pytest.skip(f"no Ray: {reason}")
    assert losses(out) == reference(command, shared)


def test_srun_lines_of_the_page(command: list[str], shared: Path, daemons: Path) -> None:
    """Two nodes with a rank each in place of four and of eight ranks."""
    doctor = page_line("multi-node.md", "srun --nodes=4").replace("--nodes=4", "--nodes=2")
    training = page_block("multi-node.md", "export ISTHMUS_RUN_TOKEN").replace("per-node=8", "per-node=1")
    run_yaml(command, shared)
    try:
        with slurm_cluster(daemons, nodes=2) as variables:
            variables |= {"MASTER_ADDR": "127.0.0.1", **with_programs()}
            hosts = run(["bash", "-c", doctor], shared, variables | {"MASTER_PORT": str(free_port())})
            trained = run(["bash", "-c", training], shared, variables | {"MASTER_PORT": str(free_port())})
    except PermissionError as reason:
        pytest.skip(f"no Slurm: {reason}")
    assert hosts.returncode in (0, 1) and "hosts" in hosts.stdout, hosts  # 1: a check of this machine has an error
    assert trained.returncode == 0 and len(losses(shared / "out")) == 2, trained


def test_torchrun_lines_of_the_page(command: list[str], shared: Path) -> None:
    """Two agents on this machine, with a rank each."""
    run_yaml(command, shared)
    variables = environment() | with_programs()

    def both(lines: list[str]) -> list[CompletedCommand]:
        agents = [
            subprocess.Popen(
                shlex.split(line), cwd=shared, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            )
            for line in lines
        ]
        outputs = [agent.communicate(timeout=300) for agent in agents]
        return [CompletedCommand(agent.returncode, *texts) for agent, texts in zip(agents, outputs, strict=True)]

    doctor = page_line("multi-node.md", "torchrun --nnodes 2 --nproc-per-node 1")
    doctor = doctor.replace("node0:29400", f"127.0.0.1:{free_port()}")
    hosts = both([doctor, doctor])
    assert any("hosts" in host.stdout and "bandwidth" in host.stdout for host in hosts), hosts
    training = page_line("multi-node.md", "torchrun --nnodes 2 --nproc-per-node 8").replace("29500", str(free_port()))
    training = training.replace("node0", "127.0.0.1").replace("per-node 8", "per-node 1") + " platform=cpu"
    trained = both([training, training.replace("--node-rank 0", "--node-rank 1")])
    assert [host.returncode for host in trained] == [0, 0] and len(losses(shared / "out")) == 2, trained


def test_kubectl_lines_of_the_page(shared: Path, daemons: Path) -> None:
    """With the true ``kubectl`` and a server in place of the cluster, which keeps what is created."""
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl: apt-get install kubernetes-client")
    create, launch = page_block("launch.md", "kubectl create secret").splitlines()
    (shared / "run.yaml").write_text("model: /shared/model\ndata: {files: [/shared/chats.jsonl]}\n")
    with kubernetes_api() as api:
        (daemons / "config").write_text(api.config)
        variables = {"KUBECONFIG": str(daemons / "config"), "HOME": str(daemons), "HF_TOKEN": "hf_0123456789abcdef"}
        for line in (create, launch, f"{launch} launch.manifest=JobSet launch.name=other"):
            done = run(["bash", "-c", line], shared, variables | with_programs())
            assert done.returncode == 0 and "created" in done.stdout, done
    prefix = "namespaces/default"
    secret, job, job_set = (
        api.created[path]
        for path in (
            f"api/v1/{prefix}/secrets", f"apis/trainer.kubeflow.org/v1alpha1/{prefix}/trainjobs",
            f"apis/jobset.x-k8s.io/v1alpha2/{prefix}/jobsets",
        )
    )  # fmt: skip
    assert b"hf_0123456789abcdef" in secret
    assert b"hf_0123456789abcdef" not in job + job_set
    assert json.loads(job)["metadata"]["name"] == "isthmus-a" and json.loads(job_set)["metadata"]["name"] == "other"


def test_filters_in_array_jobs(repository: Path, model: Path, shared: Path, daemons: Path) -> None:
    """Four jobs make the bytes of one process; a repetition and duplicates are left out."""
    pytest.importorskip("datatrove", reason="needs datatrove: pip install 'isthmus[dedup]'")
    texts = (repository / "CHANGELOG.md").read_text().split("\n- ")
    for number in range(2):
        parts = [*texts[number * 20 : number * 20 + 30], texts[0], "again and " * 50]
        lines = (json.dumps({"text": text}) for text in parts)
        (shared / "data").mkdir(exist_ok=True)
        (shared / f"data/{number}.jsonl").write_text("\n".join(lines) + "\n")
    words = [
        "prepare",
        str(shared / "data"),
        "--tokenizer",
        str(model),
        "--dedup",
        "exact",
        "--filter",
        "gopher-repetition",
    ]
    words = isthmus_words(*words, "--workers", "1")
    try:
        with slurm_cluster(daemons, nodes=2) as variables:
            done = run(
                [*words, str(shared / "by-slurm/t"), "--engine", "slurm-array", "--tasks", "2"], shared, variables
            )
            assert done.returncode == 0 and "lists what is left out" in done.stdout, done
            wait_for((shared / "by-slurm/t.json").exists, "the merge")
            wait_for(lambda: not run(["squeue", "--noheader"], shared, variables).stdout.strip(), "the end of the jobs")
    except PermissionError as reason:
        pytest.skip(f"no Slurm: {reason}")
    local = run([*words, str(shared / "local/t")], shared, {})
    assert local.returncode == 0 and "are left out" in local.stdout + local.stderr, local
    for suffix in (".bin", ".idx"):
        assert (shared / f"by-slurm/t{suffix}").read_bytes() == (shared / f"local/t{suffix}").read_bytes()
