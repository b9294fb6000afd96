"""One rank of a :class:`ranks.world.World`: joins the others, then runs the tasks that arrive on its standard input."""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import traceback
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    # Whatever a library prints must not land between the replies.
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    import torch

    torch.set_num_threads(1)
    from isthmus.engine.groups import ParallelSizes, open_groups, world_from_environment  # first: it quiets megatron
    from isthmus.platforms.detect import detect

    _, world_size, _ = world_from_environment()
    from megatron.core import parallel_state

    sizes = ParallelSizes(world_size=world_size)
    open_groups(sizes, detect("cpu"), seed=0, init_method=sys.argv[1], timeout_s=120.0)
    parallel_state.destroy_model_parallel()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            module, _, name = request["task"].rpartition(".")
            reply = {"result": getattr(importlib.import_module(module), name)(**request["settings"])}
        except Exception:
            reply = {"error": traceback.format_exc()}
        parallel_state.destroy_model_parallel()
        _leave_groups()
        gc.collect()
        print(json.dumps(reply), file=replies, flush=True)


def _leave_groups() -> None:
    """End every group but the world: Megatron-Core forgets its groups, but each keeps its threads until it is ended."""
    import torch.distributed as dist

    world = dist.group.WORLD
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not world:
            dist.destroy_process_group(group)


if __name__ == "__main__":
    main()
