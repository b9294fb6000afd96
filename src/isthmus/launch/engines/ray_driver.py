"""The driver of a run on a Ray cluster: ``python -m isthmus.launch.engines.ray_driver REQUEST``.

Ray reserves the machines and starts an actor on each. The actor runs an agent of torchrun, which starts the ranks.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

from isthmus.errors import IOFailure, IsthmusError, Preempted, UsageError
from isthmus.extras import optional_package
from isthmus.launch.engines.ray import FIRST_MACHINE, THIS_MACHINE
from isthmus.platforms.rank_env import RUN_TOKEN

with optional_package("isthmus launch ray", "ray"):
    import ray
    from ray.util import get_node_ip_address
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


class TorchrunAgent:
    """An agent of torchrun on one machine; ``stop`` is called while ``run`` waits."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        """The address of this machine in the cluster."""
        return str(get_node_ip_address())

    def missing(self, names: Sequence[str]) -> list[str]:
        """The environment variables that are not set on this machine."""
        return [name for name in names if not os.environ.get(name)]

    def run(self, words: Sequence[str], environment: dict[str, str], workdir: str) -> int:
        """Run the agent until its ranks have ended; returns its exit code."""
        self._process = subprocess.Popen(words, env=os.environ | environment, cwd=workdir)
        return self._process.wait()

    def stop(self) -> None:
        """Let the ranks save and exit."""
        if self._process is not None:
            self._process.terminate()


def run(request: dict[str, Any]) -> None:
    """Run the request of :mod:`isthmus.launch.engines.ray` on the cluster of this job.

    Raises:
        UsageError: a machine lacks a secret.
        Preempted: the job was stopped.
        IOFailure: more machines failed than there are spares.
    """
    ray.init()
    stop_requests: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        stop_requests.append(number)

    signal.signal(signal.SIGTERM, stop)
    agents = _agents(request["machines"], request["resources"])
    addresses = ray.get([agent.address.remote() for agent in agents])
    unset = ray.get([agent.missing.remote(request["secrets"]) for agent in agents])
    for address, missing in zip(addresses, unset, strict=True):
        if missing:
            raise UsageError(f"{missing[0]} of launch.secrets is not set on {address}. Start Ray there with it.")
    environment = request["environment"] | {RUN_TOKEN: secrets.token_hex(16)}
    running = {}
    first_words, other_words = request["words"]
    for agent, address in zip(agents, addresses, strict=True):
        words = first_words if agent is agents[0] else other_words
        words = [word.replace(FIRST_MACHINE, addresses[0]).replace(THIS_MACHINE, address) for word in words]
        running[agent.run.remote(words, environment, request["workdir"])] = agent, address
    failed = _wait(running, stop_requests, request["spares"])
    if stop_requests and failed:
        raise Preempted("stopped, as requested. The same command resumes from the last checkpoint, if there is one.")
    if len(failed) > request["spares"]:
        machines = ", ".join(f"{address} ({reason})" for address, reason in failed.items())
        raise IOFailure(f"the run failed on {machines}. See the messages of its ranks.")


def _agents(machines: int, resources: dict[str, int]) -> list[Any]:
    """An actor on each of ``machines``, which Ray reserves together."""
    print(f"waiting for {machines} machines with {resources} each", flush=True)
    group = placement_group([resources] * machines, strategy="STRICT_SPREAD")
    ray.get(group.ready())
    actor = ray.remote(num_cpus=resources.get("CPU", 0), num_gpus=resources.get("GPU", 0), max_concurrency=2)
    places = [PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index) for index in range(machines)]
    return [actor(TorchrunAgent).options(scheduling_strategy=place).remote() for place in places]


def _wait(running: dict[Any, tuple[Any, str]], stop_requests: list[int], spares: int) -> dict[str, str]:
    """Wait for the agents, by their results; returns why agents failed, by the address of the machine."""
    failed: dict[str, str] = {}
    is_stopping = False
    while running:
        for result in ray.wait(list(running), timeout=1.0)[0]:
            _, address = running.pop(result)
            failed |= {address: reason} if (reason := _failure(result)) else {}
        if (stop_requests or len(failed) > spares) and not is_stopping:
            is_stopping = True
            for agent, _ in running.values():
                agent.stop.remote()
    return failed


def _failure(result: Any) -> str:
    """The exit code of an agent that failed, or what happened to its machine; empty: it succeeded."""
    try:
        code = ray.get(result)
    except ray.exceptions.RayError as error:
        return type(error).__name__
    return f"exit code {code}" if code else ""


if __name__ == "__main__":
    try:
        run(json.loads(sys.argv[1]))
    except IsthmusError as error:
        print(f"isthmus: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
