"""Schedulers on this machine: a Slurm cluster and a server of ssh, each with files and keys of their own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from free_port import free_port

_SLURM = """\
ClusterName=isthmus
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.sock
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmdTimeout=10
MpiDefault=none
{nodes}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF MaxTime=INFINITE State=UP
"""
_SSHD = """\
Port {port}
ListenAddress 127.0.0.1
ListenAddress 127.0.0.2
HostKey {folder}/host
AuthorizedKeysFile {folder}/client.pub
PidFile {folder}/pid
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
"""


def wait_for(condition: Callable[[], bool], what: str, timeout_s: float = 400.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not in {timeout_s:g} s"
        time.sleep(0.1)


@contextmanager
def slurm_cluster(folder: Path, nodes: int) -> Iterator[dict[str, str]]:
    """Start a cluster of ``nodes`` nodes with 2 cores each; yields the variables of its clients.

    Raises:
        PermissionError: the programs or the permission are missing; the message has what to do.
    """
    if missing := [name for name in ("munged", "slurmctld", "slurmd", "sbatch") if shutil.which(name) is None]:
        raise PermissionError(f"no {missing[0]}: apt-get install slurm-wlm munge")
    if os.geteuid() != 0:
        raise PermissionError("run as root to start the daemons of Slurm")
    for name in ("state", "munge"):
        (folder / name).mkdir(mode=0o700)
    (folder / "munge/key").write_bytes(os.urandom(64))
    (folder / "munge/key").chmod(0o600)
    names = [f"node{number}" for number in range(1, nodes + 1)]
    host = socket.gethostname()
    lines = [f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2" for name in names]
    text = _SLURM.format(host=host, port=free_port(), folder=folder, nodes="\n".join(lines))
    (folder / "slurm.conf").write_text(text)
    variables = {"SLURM_CONF": str(folder / "slurm.conf")}
    munge = folder / "munge"
    words = ["munged", "--force", f"--socket={folder}/munge.sock", f"--key-file={munge}/key", f"--pid-file={munge}/pid"]
    try:
        subprocess.run([*words, f"--log-file={munge}/log", f"--seed-file={munge}/seed"], check=True)
        for command in (["slurmctld"], *(["slurmd", "-N", name] for name in names)):
            subprocess.run(command, env=os.environ | variables, check=True)

        def idle() -> bool:
            command = ["sinfo", "--noheader", "--states=idle", "--partition=low", "--format=%D"]
            answer = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
            return answer.stdout.strip() == str(nodes)

        wait_for(idle, "idle nodes of Slurm", 30.0)
        yield variables
    finally:
        for file in (folder / "slurmctld.pid", *(folder / f"{name}.pid" for name in names), munge / "pid"):
            end(file, children=True)


@contextmanager
def ssh_server(folder: Path) -> Iterator[list[str]]:
    """Start a server for this user at 127.0.0.1 and 127.0.0.2; yields the settings that connect to it.

    Raises:
        FileNotFoundError: the programs are missing; the message has what to do.
    """
    program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None or shutil.which("ssh-keygen") is None:
        raise FileNotFoundError("no sshd: apt-get install openssh-server openssh-client")
    for name in ("host", "client"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    port = free_port()
    (folder / "sshd_config").write_text(_SSHD.format(port=port, folder=folder))
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # without it, a server of root does not start
    options = {
        "Port": port,
        "IdentityFile": folder / "client",
        "UserKnownHostsFile": folder / "known_hosts",
        "StrictHostKeyChecking": "no",
        "LogLevel": "ERROR",
    }
    try:
        subprocess.run([program, "-f", str(folder / "sshd_config"), "-E", str(folder / "log")], check=True)
        yield [f"launch.options.{name}={value}" for name, value in options.items()]
    finally:
        end(folder / "pid", children=False)


def end(pid_file: Path, *, children: bool) -> None:
    """End a daemon, with its descendants if ``children``."""
    with suppress(OSError, ValueError, psutil.NoSuchProcess):
        daemon = psutil.Process(int(pid_file.read_text()))
        for process in [*(daemon.children(recursive=True) if children else ()), daemon]:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
