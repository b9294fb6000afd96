"""Saves a checkpoint with Megatron-LM on a CPU and loads it; not a test: ``test_async_save.py`` starts it.

    async_save.py MEGATRON_LM async|persistent [SITE_PACKAGES]

``persistent`` saves in a process that stays. SITE_PACKAGES may contain the startup hook.
"""

from __future__ import annotations

import os
import site
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

# Also in the processes that the saver spawns.
os.environ["TORCHDYNAMO_DISABLE"] = "1"
from isthmus.engine.upstream import cpu_adapter

cpu_adapter.install()
import torch  # noqa: E402

_cuda: Any = torch.cuda
_cuda.device_count = lambda: 1
_cuda.get_device_properties = lambda *_: SimpleNamespace(major=9, minor=0, name="none", total_memory=1 << 36)
if __name__ == "__mp_main__":  # ROCm's fork calls init_process_group("nccl") here
    _distributed: Any = torch.distributed
    _alone = {"backend": "gloo", "store": _distributed.HashStore(), "rank": 0, "world_size": 1}
    _distributed.init_process_group = lambda backend, init=_distributed.init_process_group: init(**_alone)
sys.path.insert(0, sys.argv[1])
for _folder in sys.argv[3:]:
    site.addsitedir(_folder)


def save_and_load(mode: str) -> None:
    import torch.distributed as dist
    from megatron.core.dist_checkpointing import ShardedTensor, load, save
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue

    def state(fill: Any) -> dict[str, Any]:
        tensors = {name: ShardedTensor.from_rank_offsets(name, fill(*shape)) for name, shape in shapes.items()}
        return {**tensors, "steps": ShardedObject("steps", {"train": 3}, (1,), (0,))}

    shapes: dict[str, tuple[int, ...]] = {"matrix": (5, 7), "vector": (64,)}
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        saved, checkpoint = state(torch.randn), os.path.join(folder, "checkpoint")
        os.mkdir(checkpoint)
        queue = AsyncCallsQueue(persistent=True) if mode == "persistent" else AsyncCallsQueue()
        queue.schedule_async_request(save(saved, checkpoint, async_sharded_save=True))
        queue.maybe_finalize_async_calls(blocking=True)
        if mode == "persistent":
            queue.close()
        loaded = load(state(torch.zeros), checkpoint)
        assert all(torch.equal(loaded[name], saved[name].data) for name in shapes)
        assert loaded["steps"] == {"train": 3}
        print("loaded what was saved", flush=True)


if __name__ == "__main__":
    save_and_load(sys.argv[2])
