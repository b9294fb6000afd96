"""Whether the machine has the memory for the copies of ``checkpoint.memory_every``."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

from isthmus.config.schema import RunConfig
from isthmus.errors import UsageError
from isthmus.platforms.base import Platform
from isthmus.recipes.plan.memory_estimate import MemoryEstimate, estimate_ranks, gib
from isthmus.recipes.plan.model_plan import ModelPlan
from isthmus.recipes.run_dir import RunDir

_HINT = "Use more machines, choose another checkpoint.memory_dir, or leave checkpoint.memory_every out."


def copies_bytes(plan: ModelPlan, rank: MemoryEstimate, *, ranks_here: int) -> int:
    """Memory of the copies on a machine: its own files and its peer's, of the last copy and of the one being written.

    ``rank`` is a rank that saves most. Only the first data-parallel ranks write weights.
    """
    writers = min(ranks_here, plan.parallel.tp * plan.parallel.pp)
    saved = ranks_here * rank.saved_state + writers * rank.saved_weights
    return 2 * (2 if plan.world_size > ranks_here else 1) * saved


def check_copies(
    plan: ModelPlan, config: RunConfig, platform: Platform, precision: str, *, ranks_here: int
) -> list[str]:
    """Check the space for the copies of this machine; returns it for the log.

    Raises:
        UsageError: the folder is missing, or it or the machine has less memory.
    """
    if config.checkpoint.memory_every is None:
        return []
    folder = Path(config.checkpoint.memory_dir)
    if not folder.is_dir():
        raise UsageError(
            f"checkpoint.memory_dir={folder} is not a folder on {socket.gethostname()}. Choose a folder of a tmpfs, "
            "such as /dev/shm."
        )
    on_gpu = platform.device_type == "cuda"
    gpu_bytes = platform.memory_for_rank_bytes(ranks_here) if on_gpu else None
    ranks = estimate_ranks(plan, config, precision, gpu_bytes=gpu_bytes)
    rank = max(ranks, key=lambda rank: rank.saved_weights + rank.saved_state)
    needed = copies_bytes(plan, rank, ranks_here=ranks_here)
    existing = sum(file.stat().st_size for file in folder.glob(f"{RunDir(Path(config.out)).copies_name}-*/*/*"))
    free = shutil.disk_usage(folder).free + existing
    what = f"checkpoint.memory_every keeps up to {gib(needed)} GiB in {folder} of a machine"
    if needed > free:
        raise UsageError(f"{what}, and {gib(free)} GiB are free there. Enlarge it (mount -o remount,size=...). {_HINT}")
    training = ranks_here * (rank.offloaded if on_gpu else rank.persistent)
    if needed > (free := platform.free_host_bytes() + existing - training):
        raise UsageError(f"{what}, and it has {gib(max(0, free))} GiB of memory besides that of the ranks. {_HINT}")
    return [f"copies in memory: up to {gib(needed)} GiB in {folder} of a machine"]
