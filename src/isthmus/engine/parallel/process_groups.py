"""The process groups of a run: who shares a layer, who follows whom, who holds a copy."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from isthmus.config.schema.parallel import ParallelConfig
from isthmus.engine.parallel.rendezvous import meet
from isthmus.errors import IsthmusError

if TYPE_CHECKING:
    from isthmus.platforms.base import Platform


@dataclass(frozen=True, slots=True)
class Position:
    """The rank of this process in every group."""

    rank: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    """Selects the data of this rank; the ranks of a context parallel group have the same."""
    cp_rank: int
    etp_rank: int
    edp_rank: int
    """Data-parallel rank of its experts."""
    is_first_stage: bool


def world_from_environment() -> tuple[int, int, int]:
    """(rank, world size, rank on this machine) as torchrun sets them; (0, 1, 0) when started alone."""
    return (
        int(os.environ.get("RANK", "0")),
        int(os.environ.get("WORLD_SIZE", "1")),
        int(os.environ.get("LOCAL_RANK", "0")),
    )


def join_ranks(
    platform: Platform, *, init_method: str | None = None, join_timeout_s: float = 600.0, timeout_s: float = 1800.0
) -> str:
    """Join the other ranks of the environment; does nothing in a process that has.

    Args:
        platform: decides the collective backend and the device of this rank.
        init_method: rendezvous URL; None takes the environment's, or a private one for a single rank.
        join_timeout_s: how long to wait for ranks that have not come yet.
        timeout_s: how long a collective waits for a peer before it fails.

    Returns:
        Who met where, for the user; empty on one machine.

    Raises:
        UsageError, Hang: see :func:`isthmus.engine.parallel.rendezvous.meet`.
    """
    rank, world_size, local_rank = world_from_environment()
    if platform.device_type == "cpu":
        from isthmus.engine.upstream import compat, cpu_adapter

        cpu_adapter.install()
        compat.cpu_random_state()
    else:
        torch.cuda.set_device(local_rank)
    if dist.is_initialized():
        return ""
    backend, met = platform.collective_backend, ""
    store: dist.Store | None = None
    if init_method is None and world_size == 1:
        store = dist.HashStore()
    elif init_method is None:
        store, met = meet(rank, world_size, collective_backend=backend, timeout_s=join_timeout_s)
        store.set_timeout(timedelta(seconds=timeout_s))
    dist.init_process_group(
        backend,
        init_method=init_method,
        store=None if store is None else dist.PrefixStore("collectives", store),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=timeout_s),
    )
    return met


def open_groups(
    parallel: ParallelConfig,
    platform: Platform,
    *,
    seed: int,
    init_method: str | None = None,
    timeout_s: float = 1800.0,
) -> Position:
    """Join the run's world, if that was not done yet, and build Megatron-Core's groups in it.

    A process may do so again; models that it built under another layout before can then no longer be run.

    Args:
        parallel: the layout. Rank order is tp fastest, then cp, dp and pp, as in Megatron-Core; of experts, within the
            ranks of a stage, etp fastest, then ep, then expert data parallel.
        platform: decides the collective backend and the device of this rank.
        seed: of the model-parallel random streams (dropout; weights are never drawn from them).
        init_method: rendezvous URL; None takes the environment's, or a private one for a single rank.
        timeout_s: how long a collective waits for a peer before it fails.

    Returns:
        This rank's place in the layout.
    """
    join_ranks(platform, init_method=init_method, timeout_s=timeout_s)

    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if parallel_state.model_parallel_is_initialized():  # a second model in one process
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.vpp if parallel.vpp > 1 else None,
        context_parallel_size=parallel.cp,
        expert_model_parallel_size=parallel.ep,
        expert_tensor_parallel_size=parallel.expert_tp,
        distributed_timeout_minutes=timeout_s / 60,
    )
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return Position(
        rank=dist.get_rank(),
        tp_rank=parallel_state.get_tensor_model_parallel_rank(),
        pp_rank=parallel_state.get_pipeline_model_parallel_rank(),
        dp_rank=parallel_state.get_data_parallel_rank(),
        cp_rank=parallel_state.get_context_parallel_rank(),
        etp_rank=parallel_state.get_expert_tensor_parallel_rank(),
        edp_rank=parallel_state.get_expert_data_parallel_rank(),
        is_first_stage=parallel_state.is_pipeline_first_stage(),
    )


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """Sum each value over all ranks, in float64; ``device`` is that of this rank."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    summed: list[float] = total.tolist()
    return summed


def barrier() -> None:
    """Wait until every rank is here."""
    dist.barrier()


def once(stage: Callable[[], None], name: str, *, patience_s: float = 86400.0) -> None:
    """Run ``stage`` on rank 0 alone; the others wait on the rendezvous store, not in a collective that times out.

    Args:
        stage: long work such as tokenizing.
        name: unlike that of any other stage of the run.
        patience_s: how long the others wait.

    Raises:
        IsthmusError: on every rank, what ``stage`` failed with.
    """
    store = dist.distributed_c10d._get_default_store()
    key = f"isthmus/{name}"
    if dist.get_rank() == 0:
        try:
            stage()
        except Exception as error:
            # The others must hear of it here: they are not in a collective that would fail with this rank.
            told = error if isinstance(error, IsthmusError) else IsthmusError(_told(error))
            store.set(key, json.dumps([told.exit_code, str(told)]))
            # This process may hold the store: it stays until they have read it, unless they are gone too.
            patience = time.monotonic() + 5.0
            while store.add(f"{key}/heard", 0) < dist.get_world_size() - 1 and time.monotonic() < patience:
                time.sleep(0.02)
            raise
        store.set(key, "[]")
    else:
        store.wait([key], timedelta(seconds=patience_s))
        if failure := json.loads(store.get(key)):
            store.add(f"{key}/heard", 1)
            heard = IsthmusError(failure[1])
            heard.exit_code = failure[0]
            raise heard
    dist.barrier()


def agree(stage: Callable[[], None]) -> None:
    """Run ``stage`` on this rank and go on only if it succeeded on all; else every rank raises what failed first."""
    failure: BaseException | None = None
    try:
        stage()
    except Exception as error:
        failure = error
    failures: list[IsthmusError | None] = [None] * dist.get_world_size()
    mine = failure if failure is None or isinstance(failure, IsthmusError) else IsthmusError(_told(failure))
    dist.all_gather_object(failures, mine)
    first = next((error for error in failures if error is not None), None)
    if first is not None:
        raise first from failure


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def close_groups() -> None:
    """Leave the run's world; harmless when none was joined."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
