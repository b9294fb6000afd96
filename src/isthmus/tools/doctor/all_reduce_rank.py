"""One rank of the all-reduce of ``isthmus doctor --bench``: ``python -m`` with store file, backend, rank and ranks."""

from __future__ import annotations

import json
import statistics
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

_REPEATS = 5
_CPU_BYTES, _GPU_BYTES = 64 << 20, 256 << 20


def main(store: str, backend: str, rank: int, ranks: int) -> None:
    on_gpu = backend == "nccl"
    if on_gpu:
        torch.cuda.set_device(rank)
    limit = timedelta(seconds=30)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=limit)
    values = torch.ones((_GPU_BYTES if on_gpu else _CPU_BYTES) // 4, device="cuda" if on_gpu else "cpu")
    times = []
    for _ in range(_REPEATS + 1):
        dist.barrier()
        start = time.perf_counter()
        dist.all_reduce(values, op=dist.ReduceOp.AVG if on_gpu else dist.ReduceOp.MAX)
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    if bool((values != 1).any()):
        raise SystemExit("the result of the all-reduce is wrong")
    if rank == 0:
        print(json.dumps({"seconds": statistics.median(times[1:]), "bytes": values.nbytes}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
