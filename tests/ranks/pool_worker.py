"""The ranks of a :class:`ranks.rank_pool.RankPool`, forked from a process that has done all imports.

This process imports what a task needs and forks a rank a line of its standard input; imports cost seconds, forks none.
A rank connects to the socket of its world, joins the others and then answers each request with a line.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    for name in ("isthmus.engine.parallel.process_groups", "ranks.tasks"):  # the first quiets megatron
        importlib.import_module(name)
    gc.freeze()  # ranks collect after each task: what was imported stays out of it, and its pages stay shared
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the ranks
    for line in sys.stdin:
        request = json.loads(line)
        if not (child := os.fork()):
            be_rank(request)
        print(child, flush=True)


def be_rank(request: dict[str, Any]) -> None:
    """Join the world and run its tasks until it hangs up; does not return."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(request["environment"])
        # What a library prints goes to the log, and nothing of this process' own streams is left.
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT, 0o600)
        for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(descriptor, number)
        with socket.socket(socket.AF_UNIX) as world:
            world.connect(request["socket"])
            world.sendall(f"{os.environ['RANK']}\n".encode())
            run_tasks(world, request["meeting"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_tasks(world: socket.socket, meeting: str) -> None:
    import torch
    from megatron.core import parallel_state

    from isthmus.config.schema import ParallelConfig
    from isthmus.engine.parallel.process_groups import open_groups
    from isthmus.platforms.detect import detect

    torch.set_num_threads(1)
    open_groups(ParallelConfig(), detect("cpu"), seed=0, init_method=f"file://{meeting}", timeout_s=120.0)
    parallel_state.destroy_model_parallel()
    for line in world.makefile():
        request = json.loads(line)
        try:
            module, _, name = request["task"].rpartition(".")
            reply = {"result": getattr(importlib.import_module(module), name)(**request["settings"])}
        except Exception:
            reply = {"error": traceback.format_exc()}
        parallel_state.destroy_model_parallel()
        leave_groups()
        gc.collect()
        world.sendall(json.dumps(reply).encode() + b"\n")


def leave_groups() -> None:
    """End every group but the world: Megatron-Core forgets its groups, but each keeps its threads until it is ended."""
    import torch.distributed as dist

    world = dist.group.WORLD
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not world:
            dist.destroy_process_group(group)


if __name__ == "__main__":
    main()
