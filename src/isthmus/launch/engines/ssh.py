"""Agents of torchrun on a list of machines, started over ssh."""

from __future__ import annotations

import os
import secrets
import shlex
import signal
import subprocess
import threading
import time
from types import FrameType

from isthmus.errors import IOFailure, MissingInput, Preempted, UsageError
from isthmus.launch.engines.job import Job, check_secrets, torchrun_environment, torchrun_words
from isthmus.platforms.rank_env import RUN_TOKEN

_SCRIPT = """\
cd {workdir} || exit 66
{environment}
{secrets}
{command} </dev/null &
agent=$!
# Nothing is read here until the input ends: a stop was requested, or the connection is lost.
{{ read -r; kill -TERM "$agent"; }} <&0 >/dev/null 2>&1 &
wait "$agent"
"""
_POLL_S = 0.1


def render(job: Job) -> str:
    """The script of each machine; secrets are not in it but in its input."""
    parts = [f"# {host}: {shlex.join(_ssh(job, host))}\n{_script(job, host)}" for host in _hosts(job)]
    return "\n".join(parts)


def submit(job: Job) -> int:
    """Run the scripts and wait for them.

    Ctrl-C and SIGTERM reach the ranks, which save and exit. If more machines fail than there are spares, the others
    are stopped.

    Raises:
        Preempted: a stop was requested.
        IOFailure: machines failed; their ranks have printed the reason.
    """
    check_secrets(job)
    values = [secrets.token_hex(16), *(os.environ[name] for name in job.machines.secrets)]
    if broken := [name for name in job.machines.secrets if "\n" in os.environ[name]]:
        raise UsageError(f"{broken[0]} of launch.secrets has several lines, which ssh does not pass on. Use a file.")
    stopped = threading.Event()

    def stop(number: int, frame: FrameType | None) -> None:
        stopped.set()

    agents: dict[str, subprocess.Popen[bytes]] = {}
    previous = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        for host in _hosts(job):
            words = [*_ssh(job, host), shlex.join(["bash", "-c", _script(job, host)])]
            # In a session of its own, since ssh would end at Ctrl-C, and the ranks before they have saved.
            agents[host] = subprocess.Popen(words, stdin=subprocess.PIPE, start_new_session=True)
            _input(agents[host], "".join(f"{value}\n" for value in values))
        failed = _wait(agents, stopped, job.machines.spares)
    except FileNotFoundError:
        raise MissingInput("ssh is not installed on this machine. Install the client of OpenSSH.") from None
    finally:
        _end_input(agents)
        for number, handler in previous.items():
            signal.signal(number, handler)
    if stopped.is_set() and failed:
        raise Preempted("stopped, as requested. The same command resumes from the last checkpoint, if there is one.")
    if len(failed) > job.machines.spares:
        hosts = ", ".join(f"{host} (exit code {code})" for host, code in failed.items())
        raise IOFailure(f"the run failed on {hosts}. See the messages of its ranks; 255 is an error of ssh itself.")
    return 0


def _wait(agents: dict[str, subprocess.Popen[bytes]], stopped: threading.Event, spares: int) -> dict[str, int]:
    """Wait for all machines; returns the exit codes of those that failed, in order."""
    failed: dict[str, int] = {}
    running = dict(agents)
    while running:
        time.sleep(_POLL_S)
        for host, agent in list(running.items()):
            if (code := agent.poll()) is not None:
                del running[host]
                failed |= {host: code} if code else {}
        if stopped.is_set() or len(failed) > spares:
            _end_input(running)
    return failed


def _input(agent: subprocess.Popen[bytes], text: str) -> None:
    assert agent.stdin is not None
    agent.stdin.write(text.encode())
    agent.stdin.flush()


def _end_input(agents: dict[str, subprocess.Popen[bytes]]) -> None:
    for agent in agents.values():
        if agent.stdin is not None and not agent.stdin.closed:
            agent.stdin.close()


def _hosts(job: Job) -> tuple[str, ...]:
    hosts = job.machines.hosts
    if len(hosts) != job.nodes or len(set(hosts)) != len(hosts):
        raise UsageError(
            f"launch.hosts has {len(set(hosts))} machines, and launch.nodes={job.machines.nodes} with "
            f"launch.spares={job.machines.spares} needs {job.nodes}. Name each machine once."
        )
    if dashed := [host for host in hosts if host.startswith("-")]:
        raise UsageError(f"launch.hosts has {dashed[0]}, which ssh would read as an option. Give [USER@]HOST.")
    return hosts


def _ssh(job: Job, host: str) -> list[str]:
    options = {"BatchMode": "yes", "ServerAliveInterval": "15", **job.machines.options}
    return ["ssh", "-T", *(word for name, value in options.items() for word in ("-o", f"{name}={value}")), host]


def _script(job: Job, host: str) -> str:
    first, address = (name.rpartition("@")[2] for name in (_hosts(job)[0], host))
    names = (RUN_TOKEN, *job.machines.secrets)
    return _SCRIPT.format(
        workdir=shlex.quote(job.workdir),
        environment="\n".join(
            f"export {k}={shlex.quote(v)}  # {why}" for k, (v, why) in torchrun_environment(job).items()
        ),
        secrets="\n".join(f"IFS= read -r {name} && export {name} || exit 2" for name in names),
        command=shlex.join(torchrun_words(job, first, local_address=address)),
    )
