"""The GPUs that a plan is for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from isthmus.errors import UsageError
from isthmus.platforms.parts import Part, part_named
from isthmus.tools.planner.cost.cluster import Cluster

CONTEXT_BYTES = 1 << 30
"""Outside of the allocator: the context of the GPU, kernels, buffers of NCCL or RCCL."""
FRAGMENTATION = 0.05
"""Share of activations and temporary memory that the allocator reserves in addition, with expandable segments."""
_GPUS = re.compile(r"(?:(\d{1,3})\s*x\s*)?([A-Za-z].*)|(\d{1,3})", re.IGNORECASE)
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*(GiB|GB|TiB|TB|MiB|MB|G)?", re.IGNORECASE)
_UNITS = {"gib": 2**30, "g": 2**30, "gb": 10**9, "tib": 2**40, "tb": 10**12, "mib": 2**20, "mb": 10**6}


@dataclass(frozen=True, slots=True)
class PlannedGpus:
    """``nodes`` machines with the same GPUs."""

    gpus_per_node: int
    nodes: int
    memory_bytes: int
    """Memory of a GPU."""
    part: Part | None
    """None: only the memory is known, and the plan has no step times."""

    @property
    def world_size(self) -> int:
        return self.gpus_per_node * self.nodes

    @property
    def cluster(self) -> Cluster | None:
        """The cluster for step times; None without a data sheet."""
        return None if self.part is None else Cluster(self.part, self.gpus_per_node, self.nodes)

    @property
    def usable_bytes(self) -> int:
        """What is left for the tensors of a run, and for what the allocator reserves in addition."""
        return self.memory_bytes - CONTEXT_BYTES

    def __str__(self) -> str:
        name = "GPU" if self.part is None else self.part.name
        return f"{self.world_size:,} x {name} of {self.memory_bytes / 2**30:.1f} GiB"


def parse_machine(gpus: str | None, memory: str | None, nodes: int) -> PlannedGpus:
    """The machine of ``--gpus 8xMI300X``, ``--memory 80GiB`` (which overrides that of the part) and ``--nodes``.

    Raises:
        UsageError: neither is given, the part is unknown, or one of them cannot be read.
    """
    if gpus is None and memory is None:
        raise UsageError(
            "which GPUs is the plan for? Give --gpus, such as 8xMI300X, or --memory, the memory of a GPU, such as "
            "80GiB."
        )
    count, part = _gpus(gpus) if gpus is not None else (1, None)
    if memory is not None:
        size = _bytes(memory)
    elif part is not None:
        size = int(part.memory_gib * 2**30)
    else:
        raise UsageError(f"--gpus {gpus} does not name a GPU. Give --gpus {gpus}xH100, or add --memory 80GiB.")
    if size <= CONTEXT_BYTES:
        raise UsageError(
            f"--memory {memory} is less than the {CONTEXT_BYTES / 2**30:g} GiB of a GPU that the runtime and the "
            "communication library need. Give the memory of a GPU, such as 80GiB."
        )
    return PlannedGpus(count, nodes, size, part)


def _gpus(text: str) -> tuple[int, Part | None]:
    match = _GPUS.fullmatch(text.strip())
    count = 0 if match is None else int(match[1] or match[3] or 1)
    if match is None or not count:
        raise UsageError(f"--gpus {text} was not understood. Give the GPUs of a node, such as 8xMI300X or H100.")
    return count, None if match[2] is None else part_named(match[2])


def _bytes(text: str) -> int:
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--memory {text} was not understood. Give the memory of a GPU with its unit, such as 80GiB.")
    return int(float(match[1]) * _UNITS[(match[2] or "GiB").lower()])
