"""The GPUs that a plan is for."""

from __future__ import annotations

import re
from dataclasses import dataclass

from isthmus.errors import UsageError
from isthmus.platforms.parts import Part, find_part, part_named
from isthmus.tools.planner.cost.cluster import Cluster

CONTEXT_BYTES = 1 << 30
"""Outside of the allocator: the context of the GPU, kernels, buffers of NCCL or RCCL."""
FRAGMENTATION = 0.05
"""Share of activations and temporary memory that the allocator reserves in addition, with expandable segments."""
_USUAL_NODE, _RACK_NODE = 8, 4
"""GPUs of a node: of the usual servers, and of racks whose links join all nodes."""
_REVERSED = re.compile(r"([A-Za-z].*?)\s*[x*:]\s*(\d{1,3})", re.IGNORECASE)
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
    rack_nodes: int | None = None
    """See :class:`Cluster`."""
    oversubscription: float = 1.0
    storage_gb_s: float | None = None
    """Throughput of the shared file system; None: an assumption."""
    failure_hours: float | None = None
    """Mean time between failures of the run; None: an assumption."""

    @property
    def world_size(self) -> int:
        return self.gpus_per_node * self.nodes

    @property
    def cluster(self) -> Cluster | None:
        """The cluster for step times; None without a data sheet."""
        if self.part is None:
            return None
        return Cluster(self.part, self.gpus_per_node, self.nodes, self.rack_nodes, self.oversubscription)

    @property
    def usable_bytes(self) -> int:
        """What is left for the tensors of a run, and for what the allocator reserves in addition."""
        return self.memory_bytes - CONTEXT_BYTES

    def __str__(self) -> str:
        name = "GPU" if self.part is None else self.part.name
        return f"{self.world_size:,} x {name} of {self.memory_bytes / 2**30:.1f} GiB"


def parse_machine(gpus: str | None, memory: str | None, nodes: int | None) -> PlannedGpus:
    """The machine of ``--gpus 8xMI300X``, ``--memory 80GiB`` (which overrides that of the part) and ``--nodes``.

    Without ``nodes``, more GPUs than the usual node has are several nodes: 16xMI300X is two of eight.

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
    if nodes is None:
        usual = _RACK_NODE if part is not None and part.rack else _USUAL_NODE
        nodes = count // usual if count > usual and count % usual == 0 else 1
        count //= nodes
    return PlannedGpus(count, nodes, size, part)


def _gpus(text: str) -> tuple[int, Part | None]:
    match = _GPUS.fullmatch(text.strip())
    count = 0 if match is None else int(match[1] or match[3] or 1)
    if match is None or not count:
        raise UsageError(f"--gpus {text} was not understood. Give the GPUs of a node, such as 8xMI300X or H100.")
    if match[2] is None:
        return count, None
    swapped = _REVERSED.fullmatch(match[2])
    if swapped is not None and find_part(match[2]) is None and (part := find_part(swapped[1])) is not None:
        raise UsageError(f"--gpus {text}: the number comes first. Did you mean {swapped[2]}x{part.name}?")
    return count, part_named(match[2])


def _bytes(text: str) -> int:
    match = _MEMORY.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--memory {text} was not understood. Give the memory of a GPU with its unit, such as 80GiB.")
    return int(float(match[1]) * _UNITS[(match[2] or "GiB").lower()])
