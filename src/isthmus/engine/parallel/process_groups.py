"""The process groups of a run."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from isthmus.config.schema.parallel import ParallelConfig
from isthmus.engine.local_store import local_store
from isthmus.errors import IsthmusError, error_of, explain
from isthmus.platforms import rank_env
from isthmus.platforms.network_interfaces import GLOO, loopback

if TYPE_CHECKING:
    from isthmus.platforms.base import Platform

_T = TypeVar("_T")
_NCCL_MARGIN_S = 30.0
"""NCCL ends a process that waits too long, without a message that names the lost rank; the heartbeat comes first."""


@dataclass(frozen=True, slots=True)
class Position:
    rank: int
    tp_rank: int
    pp_rank: int
    dp_rank: int
    """Selects this rank's data; the same for all ranks of a context parallel group."""
    cp_rank: int
    etp_rank: int
    edp_rank: int
    """Expert data-parallel rank."""
    is_first_stage: bool


FIRST_RANK = Position(rank=0, tp_rank=0, pp_rank=0, dp_rank=0, cp_rank=0, etp_rank=0, edp_rank=0, is_first_stage=True)


def init_process_group(
    platform: Platform,
    *,
    store: dist.Store | None = None,
    init_method: str | None = None,
    timeout_s: float = 1800.0,
) -> None:
    """Initialize torch.distributed, once per process.

    ``store`` comes from a completed rendezvous. Without ``store`` and ``init_method``, ranks of
    ``--nproc`` use its store, and others ``env://``. NCCL gets no ``device_id``: with it, every rank splits the
    communicator of all ranks once for each of Megatron-Core's groups, also for those that it is not in.
    """
    if platform.device_type == "cpu":
        from isthmus.engine.upstream import compat, cpu_adapter

        cpu_adapter.install()
        compat.cpu_random_state()
        compat.share_gloo_devices()
    else:
        torch.cuda.set_device(platform.device_index())
    if dist.is_initialized():
        return
    if rank_env.world_size() == 1 and (interface := loopback()):
        os.environ.setdefault(GLOO, interface.name)  # gloo listens with one rank too
    if store is None and init_method is None:
        store = dist.HashStore() if rank_env.world_size() == 1 else local_store()
    dist.init_process_group(
        platform.collective_backend,
        init_method=init_method,
        store=None if store is None else dist.PrefixStore("collectives", store),
        rank=rank_env.rank(),
        world_size=rank_env.world_size(),
        timeout=_limit(platform, timeout_s),
    )


def _limit(platform: Platform, timeout_s: float) -> timedelta:
    return timedelta(seconds=timeout_s + (_NCCL_MARGIN_S if platform.collective_backend == "nccl" else 0.0))


def open_groups(
    parallel: ParallelConfig,
    platform: Platform,
    *,
    seed: int,
    init_method: str | None = None,
    timeout_s: float = 1800.0,
) -> Position:
    """Initialize torch.distributed if necessary, and build Megatron-Core's process groups.

    Rank order is tp fastest, then cp, dp, pp, as in Megatron-Core; for experts etp, ep, expert dp within a stage.
    ``seed`` is for the model-parallel random streams. A second call invalidates models built under the previous layout.
    """
    init_process_group(platform, init_method=init_method, timeout_s=timeout_s)

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
        create_gloo_process_groups=False,  # of data-parallel ranks: nothing uses them, and each peer is a socket
        distributed_timeout_minutes=_limit(platform, timeout_s) / timedelta(minutes=1),
    )
    if parallel.fsdp:
        _open_copies(parallel, _limit(platform, timeout_s))
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


def _open_copies(parallel: ParallelConfig, timeout: timedelta) -> None:
    """Set Megatron-Core's groups within and between the copies of the model for HSDP, which has no stages and experts.

    It makes them itself for several instances of its distributed optimizer, but only with the package einops.
    """
    from megatron.core import parallel_state

    ranks = torch.arange(dist.get_world_size()).view(-1, parallel.shards(dist.get_world_size()), parallel.tp)
    if len(ranks) == 1:
        return

    def group_of_this_rank(groups: torch.Tensor) -> dist.ProcessGroup:
        created = [(group, parallel_state.create_group(group, timeout=timeout)) for group in groups.tolist()]
        return next(process_group for group, process_group in created if dist.get_rank() in group)

    state: Any = parallel_state
    state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = group_of_this_rank(ranks.transpose(1, 2).flatten(0, 1))
    state._INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP = group_of_this_rank(ranks.flatten(1).t())


def sum_over_ranks(values: list[float], device: torch.device) -> list[float]:
    """In float64."""
    total = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return total.tolist()


def sum_bytes(tensors: Sequence[torch.Tensor], *, rank0_only: bool = False) -> bool:
    """Assemble contiguous tensors in place: each element is set on at most one rank, and zero on the others.

    Returns whether this rank has the result. Bytes are added, so that values such as -0.0 do not change.
    """
    parts = [tensor.view(-1).view(torch.uint8) for tensor in tensors]
    flat = parts[0] if len(parts) == 1 else torch.cat(parts)
    words = flat.view(torch.int64) if flat.numel() % 8 == 0 else flat
    if rank0_only:
        dist.reduce(words, dst=0)
    else:
        dist.all_reduce(words)
    if rank0_only and dist.get_rank():
        return False
    if len(parts) > 1:
        for part, values in zip(parts, flat.split([part.numel() for part in parts]), strict=True):
            part.copy_(values)
    return True


def gather_objects(value: _T, group: dist.ProcessGroup | None = None) -> list[_T]:
    """The objects of all ranks, or of those of ``group``, in their order; a collective."""
    values: list[_T] = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def barrier() -> None:
    dist.barrier()


def on_rank_0(stage: Callable[[], None], name: str, *, timeout_s: float = 86400.0) -> None:
    """Run ``stage`` on rank 0; the others wait on the rendezvous store, because collectives time out earlier.

    A collective. Every rank raises an IsthmusError of ``stage``; after other exceptions the heartbeat ends the ranks.
    """
    store, key = dist.distributed_c10d._get_default_store(), f"isthmus/{next(_stages)}/{name}"
    if dist.get_rank() == 0:
        try:
            stage()
        except IsthmusError as error:
            store.set(key, json.dumps([error.exit_code, str(error)]))
            raise
        store.set(key, "[]")
    else:
        store.wait([key], timedelta(seconds=timeout_s))
        if failure := json.loads(store.get(key)):
            raise error_of(*failure)


def agree(stage: Callable[[], None], group: dist.ProcessGroup | None = None) -> None:
    """Run ``stage`` on every rank; if any fails, all raise the error of the lowest failed rank.

    ``group`` has all ranks; one of its own is needed in another thread than that of training.
    """
    failure: BaseException | None = None
    try:
        stage()
    except Exception as error:
        failure = error
    mine = failure
    if failure is not None and not isinstance(failure, IsthmusError):
        mine = error_of(*explain(failure))
    first = next((error for error in gather_objects(mine, group) if error is not None), None)
    if first is not None:
        raise first from failure


_stages = itertools.count()
"""Numbers the stages of this process: every rank has the same."""


def close_groups() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()
