"""Environment variables, threads and allocator of the process of a rank."""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch

from isthmus.config.load import load_recorded
from isthmus.engine.linear.tuned_matmuls import tuned_threads
from isthmus.errors import UsageError, counted
from isthmus.platforms import rank_env
from isthmus.platforms.cpu_threads import cores, cores_in_use
from isthmus.platforms.deterministic import use_deterministic_algorithms
from isthmus.platforms.environment import apply_env, remarks_on
from isthmus.recipes.plan.validation import RunContext

_MAX_THREADS = 64
"""Most threads of a rank on a machine with few cores."""
_logger = logging.getLogger(__name__)


def leave_busy_cores(context: RunContext) -> RunContext:
    """Leave cores to other processes: on a CPU, threads that wait for busy cores are slower than fewer threads.

    The number of threads in ``tune.file`` counts instead. It affects the last bits of a result. It is chosen when a run
    begins, and recorded in its config.
    """
    config, run_dir = context.config, context.run_dir
    is_alone = context.platform.device_type == "cpu" and rank_env.world_size() == 1
    if not is_alone or config.train.threads is not None or "OMP_NUM_THREADS" in os.environ:
        return context
    if context.resume is not None:
        recorded = load_recorded(run_dir.config).train.threads if run_dir.config.is_file() else None
        threads, reason = recorded, "as when the run began"
    elif (tuned := tuned_threads(config.tune.file, context.platform)) is not None:
        threads, reason = tuned, "measured by isthmus tune (tune.file)"
    else:
        available, used = cores(), cores_in_use()
        threads = max(1, available - used) if used else None
        reason = f"other processes use {used} of this machine's {available} cores"
    if threads is None:
        return context
    changed = config.model_copy(update={"train": config.train.model_copy(update={"threads": threads})})
    return replace(context, config=changed, messages=(*context.messages, f"train.threads={threads}: {reason}"))


def prepare_process(context: RunContext) -> list[str]:
    """Set environment variables, threads and the allocator of this process; returns log messages."""
    config, platform, shape = context.config, context.platform, context.shape
    local_ranks = rank_env.local_world_size()
    on_gpu = platform.device_type == "cuda"
    applied = apply_env(platform, shape, device_known=True)
    environment = [f"{name}={value}: {reason}" for name, (value, reason) in applied.items()]
    messages = [*(environment if on_gpu else ()), *remarks_on(os.environ, shape, on_gpu=on_gpu)]
    if shape.gemm_tuning_file is not None and platform.no_gemm_tuning is not None:
        messages.append(f"train.gemm_tuning=true has no effect: {platform.no_gemm_tuning}")
    if config.train.deterministic:
        messages.append(use_deterministic_algorithms(platform))
    threads = config.train.threads
    if threads is not None:
        if threads > (most := max(_MAX_THREADS, 4 * (os.cpu_count() or 1))):  # OpenMP ends a process that has too many
            raise UsageError(f"train.threads={threads} is more than the {most} that are sensible here. Lower it.")
        torch.set_num_threads(threads)
        messages.append(f"{counted(threads, 'thread')} a rank (train.threads)")
    elif platform.device_type == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        available = cores()
        threads = max(1, available // local_ranks)
        torch.set_num_threads(threads)
        on_cores = f"{counted(local_ranks, 'rank')} on this machine's {counted(available, 'core')}"
        messages.append(f"{counted(threads, 'thread')} a rank ({on_cores})")
    details = platform.prepare_process()
    for detail in () if on_gpu else (*details, *environment):
        _logger.debug(detail)
    return [*messages, *(details if on_gpu else ())]
