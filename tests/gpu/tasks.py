"""Rank tasks of the tests in this folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from isthmus.config.schema import ParallelConfig
from isthmus.engine.checkpoint import run_state, save_load
from isthmus.engine.checkpoint.checkpoint_writer import SaveOptions
from isthmus.engine.compiled import compiled_versions, set_compile
from isthmus.engine.optim.state_offload import StateOffload
from isthmus.engine.parallel.process_groups import agree, open_groups, sum_over_ranks
from ranks.pool_worker import platform
from ranks.tasks import start, train


def collectives() -> dict[str, list[Any]]:
    """Name -> [result, expected result] of each collective that the engine uses, in the dtypes that it uses."""
    open_groups(ParallelConfig(), platform(), seed=0)
    rank, size, device = dist.get_rank(), dist.get_world_size(), torch.device(platform().device_type)
    inputs = [float(item) for item in range(size)]
    values: dict[str, list[Any]] = {}
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.int32):
        mine = torch.full((3,), rank, dtype=dtype, device=device)
        for operation, expected in ((dist.ReduceOp.SUM, sum(inputs)), (dist.ReduceOp.MAX, inputs[-1])):
            reduced = mine.clone()
            dist.all_reduce(reduced, operation)
            values[f"all_reduce {operation} {dtype}"] = [reduced.tolist(), [expected] * 3]
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        mine = torch.full((2,), rank, dtype=dtype, device=device)
        gathered = mine.new_empty(2 * size)
        dist.all_gather_into_tensor(gathered, mine)
        values[f"all_gather_into_tensor {dtype}"] = [gathered.tolist(), [item for item in inputs for _ in range(2)]]
    for dtype in (torch.float32, torch.bfloat16):
        parts = torch.arange(2 * size, device=device).to(dtype)
        scattered = parts.new_empty(2)
        dist.reduce_scatter_tensor(scattered, parts)
        values[f"reduce_scatter_tensor {dtype}"] = [scattered.tolist(), [size * (2.0 * rank + k) for k in range(2)]]
        # Rank r sends r + 1 rows to each rank.
        rows = torch.full(((rank + 1) * size, 2), rank, dtype=dtype, device=device)
        received = rows.new_empty(sum(item + 1 for item in range(size)), 2)
        dist.all_to_all_single(received, rows, [item + 1 for item in range(size)], [rank + 1] * size)
        values[f"all_to_all_single {dtype}"] = [
            received[:, 0].tolist(),
            [item for item in inputs for _ in range(int(item) + 1)],
        ]
    neighbor = torch.full((4,), -1.0, device=device)
    operations = [
        dist.P2POp(dist.isend, torch.full((4,), float(rank), device=device), (rank + 1) % size),
        dist.P2POp(dist.irecv, neighbor, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations) if size > 1 else ():
        work.wait()
    values["batch_isend_irecv"] = [neighbor.tolist(), [float((rank - 1) % size) if size > 1 else -1.0] * 4]
    values["sum_over_ranks"] = [sum_over_ranks([1.0, 0.5], device), [size, size / 2]]
    agree(lambda: None)
    return values


def checkpoint_peak(*, root: str, **settings: Any) -> dict[str, int]:
    """Bytes of GPU memory before a checkpoint and at most during it, and bytes of the trained state."""
    training = start(**settings)
    training.stepper.train_step(training.batches.step(0))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    progress, options = run_state.Progress(step=1, data=""), SaveOptions(keep=1)
    save_load.save(Path(root), training.stepper, progress, training.model.plan.parallel, options)
    parameters = sum(parameter.numel() for stage in training.model.stages for parameter in stage.parameters())
    return {"before": before, "peak": torch.cuda.max_memory_allocated(), "parameters": parameters}


def training_peak(**settings: Any) -> dict[str, int]:
    """Bytes of GPU memory at most, from before the model is built to after two steps."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    training = start(**settings)
    for step in range(2):
        training.stepper.train_step(training.batches.step(step))
    parameters = sum(parameter.numel() for stage in training.model.stages for parameter in stage.parameters())
    return {"peak": torch.cuda.max_memory_allocated() - before, "parameters": parameters}


def memory_without_state(**settings: Any) -> dict[str, int]:
    """Bytes of GPU memory after a step, while its state is on the host, and after it has come back."""
    training = start(**settings)
    stepper = training.stepper
    stepper.train_step(training.batches.step(0))
    stepper.optimizer.zero_grad()
    before = torch.cuda.memory_allocated()
    with StateOffload(stepper.model, stepper.optimizer).on_host():
        within = torch.cuda.memory_allocated()
    parameters = sum(parameter.numel() for stage in stepper.model for parameter in stage.parameters())
    return {"before": before, "within": within, "after": torch.cuda.memory_allocated(), "parameters": parameters}


def compiled(**settings: Any) -> dict[str, Any]:
    """Losses without and with ``train.compile``, and the graphs compiled after 2 and after all steps."""

    eager = train(**settings, more={"compile": False})
    compiled_versions.clear()
    with_regions = settings | {"more": {"compile": True}}
    try:
        train(**with_regions | {"steps": 2})
        early = compiled_versions.total()
        fused = train(**with_regions)
    finally:
        set_compile(False)
    graphs = [early, compiled_versions.total()]
    return {"eager": eager["loss"], "compiled": fused["loss"], "graphs": graphs}
