"""The ranks of a :class:`ranks.rank_pool.RankPool`, forked from a shared server that has all modules imported.

The fork of a pytest process forks one rank per line of stdin. A rank connects to the socket of its pool, joins the
process group and answers each request with one line.
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
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from isthmus.platforms.base import Platform

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from shared_server import serve

PLATFORM = "ISTHMUS_TEST_PLATFORM"
"""Environment variable with the platform of a rank."""


def platform() -> Platform:
    """The platform of this rank: cpu, or the one that tests/gpu chose."""
    from isthmus.platforms.detect import detect

    return detect(os.environ.get(PLATFORM, "cpu"))


def main() -> None:
    gc.disable()  # imports leave no garbage: a sixth of their time
    for name in ("isthmus.engine.parallel.process_groups", "ranks.tasks"):  # the first disables warnings of megatron
        importlib.import_module(name)
    importlib.import_module("isthmus.families.registry").all_families()  # imports them
    import torch

    if not torch.backends.cuda.is_built():  # its import starts CUDA, which a fork cannot use
        with suppress(ImportError):
            importlib.import_module("bitsandbytes")  # 2 s, in each rank that quantizes
    gc.freeze()  # garbage collection in ranks skips imported objects; their pages stay shared
    gc.enable()
    serve()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # ranks are not waited for
    for line in sys.stdin:
        request = json.loads(line)
        if not (child := os.fork()):
            run_rank(request)
        print(child, flush=True)


def run_rank(request: dict[str, Any]) -> None:
    """Join the process group and run tasks until the socket is closed. Does not return."""
    code = 1
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.update(request["environment"])
        # Output of libraries goes to the log; the streams of the server are not used.
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT, 0o600)
        for number, descriptor in enumerate((os.open(os.devnull, os.O_RDONLY), log, log)):
            os.dup2(descriptor, number)
        with socket.socket(socket.AF_UNIX) as world:
            world.connect(request["socket"])
            world.sendall(f"{os.environ['RANK']}\n".encode())
            run_tasks(world, request["rendezvous_file"])
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def run_tasks(world: socket.socket, rendezvous_file: str) -> None:
    import torch
    from megatron.core import parallel_state

    from isthmus.config.schema import ParallelConfig
    from isthmus.engine.parallel.process_groups import open_groups

    torch.set_num_threads(1)
    open_groups(ParallelConfig(), platform(), seed=0, init_method=f"file://{rendezvous_file}", timeout_s=120.0)
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
    """Destroy all groups except the world: Megatron-Core only drops references, and the threads of a group remain."""
    import torch.distributed as dist

    world = dist.group.WORLD
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not world:
            dist.destroy_process_group(group)


if __name__ == "__main__":
    main()
