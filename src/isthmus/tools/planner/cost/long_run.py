"""What a long run loses beside its steps: start-up, saves, failures and restarts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from isthmus.launch.heartbeat import LOST_S
from isthmus.tools.planner.cost.cluster import Cluster, Ring
from isthmus.tools.planner.cost.step_time import CONTENTION, HOST_SHARE

PROCESS_S = 20.0
"""Python, torch and Megatron-Core are imported: an assumption for files in the page cache or on a local disk."""
RENDEZVOUS_S_PER_RANK = 0.9e-3
"""16,384 ranks have joined after 14 s (``benchmarks/start_at_scale.py``, without the network)."""
COMMUNICATORS_S_PER_RANK = 3e-3
"""All communicators of a run: less than 30 s on more than 10,000 GPUs (Jiang et al., MegaScale, NSDI 2024, 3.5)."""
FIRST_STEP_S = 60.0
"""Regions are compiled, and matmuls tried: an assumption."""
REPLACEMENT_S = 60.0
"""The scheduler ends the processes and starts them on a spare node: an assumption."""
STORAGE_GB_S_PER_NODE, STORAGE_GB_S = 2.0, 2000.0
"""Assumed throughput of a shared file system, for each node and in total. 2 TB/s is that of Llama 3's storage."""
GPU_HOURS_PER_FAILURE = 50_700.0
"""Llama 3 405B: 419 unexpected interruptions of 16,384 GPUs in 54 days. Both are figures of "The Llama 3 Herd of
Models" (2024), section 3.3.
"""
FILES_EVERY_S = 3600.0
"""Assumed time between checkpoints in files where copies in memory replace most of them."""


@dataclass(frozen=True, slots=True)
class SaveInterval:
    """One way of saving the state, with its best interval."""

    steps: int
    """Between two saves."""
    pause_s: float
    """Training waits for a save."""
    restart: Mapping[str, float]
    """Seconds from a failure to the first new step, by part."""
    goodput: float
    """Share of the time in which steps are computed that count, 0..1."""

    @property
    def restart_s(self) -> float:
        return sum(self.restart.values())


@dataclass(frozen=True, slots=True)
class LongRun:
    start: Mapping[str, float]
    """Seconds from the command to the first step, by part."""
    state_bytes: float
    """Size of a checkpoint."""
    write_s: float
    """A checkpoint is written to files, beside the steps."""
    failure_s: float
    """Mean time between failures that end the run."""
    files: SaveInterval
    memory: SaveInterval
    """With copies in the memory of a node and of a peer."""

    @property
    def start_s(self) -> float:
        return sum(self.start.values())


def long_run(
    cluster: Cluster,
    step_s: float,
    *,
    weight_bytes: float,
    weight_copies: int,
    state_bytes: float,
    storage_gb_s: float | None = None,
    failure_s: float | None = None,
) -> LongRun:
    """Estimate what a run on ``cluster`` loses between its steps.

    Args:
        cluster: the GPUs.
        step_s: seconds of a step.
        weight_bytes: size of all weights, which a run reads at its start and at a restart.
        weight_copies: nodes that read the same weights.
        state_bytes: size of a checkpoint.
        storage_gb_s: throughput of the shared file system over all nodes; None: 2 GB/s a node, 2 TB/s at most.
        failure_s: mean time between failures of the run; None: a failure in 50,700 GPU hours.
    """
    world = cluster.world_size
    storage = 1e9 * (storage_gb_s or min(STORAGE_GB_S_PER_NODE * cluster.nodes, STORAGE_GB_S))
    failure_s = failure_s or 3600 * GPU_HOURS_PER_FAILURE / world
    processes = {
        "processes": PROCESS_S,
        "rendezvous": RENDEZVOUS_S_PER_RANK * world,
        "communicators": COMMUNICATORS_S_PER_RANK * world,
    }
    weights_s, write_s = weight_copies * weight_bytes / storage, state_bytes / storage
    start = {**processes, "weights": weights_s, "first step": FIRST_STEP_S}
    again = {"detection": LOST_S, "replacement": REPLACEMENT_S, **processes}
    host_s = state_bytes / world / (HOST_SHARE * cluster.part.host_gb_s * 1e9)
    send_s = Ring(cluster, 2, cluster.devices_per_node).send(state_bytes / world)
    files = _best_interval(
        step_s, host_s, write_s, {**again, "checkpoint": weights_s + write_s, "first step": FIRST_STEP_S}, failure_s
    )
    memory = _best_interval(
        step_s,
        host_s + CONTENTION * send_s,
        send_s,
        {**again, "copies": host_s + cluster.devices_per_node * send_s, "first step": FIRST_STEP_S},
        failure_s,
        share=1 - host_s / FILES_EVERY_S,
    )
    return LongRun(start, state_bytes, write_s, failure_s, files, memory)


def _best_interval(
    step_s: float, pause_s: float, write_s: float, restart: Mapping[str, float], failure_s: float, share: float = 1.0
) -> SaveInterval:
    """The number of steps between saves with the highest goodput; a save ends before the next one begins.

    It is within 2% of the best number, near the square root of 2 pause failure (Young 1974).
    """
    fewest = max(1, math.ceil(write_s / step_s))
    numbers = [fewest]
    while numbers[-1] * step_s < 4 * failure_s:
        numbers.append(numbers[-1] * 51 // 50 + 1)
    lost_s = sum(restart.values()) + write_s
    best = max(numbers, key=lambda steps: goodput(steps * step_s, pause_s, lost_s, failure_s))
    return SaveInterval(best, pause_s, restart, share * goodput(best * step_s, pause_s, lost_s, failure_s))


def goodput(interval_s: float, pause_s: float, restart_s: float, failure_s: float) -> float:
    """Share of the time that computes steps which count, with failures at random (Daly 2006, equation 13).

    Args:
        interval_s: computation between two saves.
        pause_s: a save.
        restart_s: from a failure to the next step, with work that is repeated because a save had not ended.
        failure_s: mean time between failures.
    """
    cycles = (interval_s + pause_s) / failure_s
    if cycles + restart_s / failure_s > 500:  # more failures than any interval survives
        return 0.0
    return interval_s / (failure_s * math.exp(restart_s / failure_s) * math.expm1(cycles))
