"""Run in a rank's process: does megatron-core still have the defects of upstream/compat.py?

Each returns the result of upstream alone, and with the workaround.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import megatron.core.optimizer
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.optimizer import distrib_optimizer
from megatron.core.tensor_parallel import random

from isthmus.engine.checkpoint import run_state, save_load
from isthmus.engine.checkpoint.checkpoint_writer import SaveOptions
from isthmus.engine.optim.optimizer import distributed_optimizers, torch_optimizers
from ranks.tasks import start
from unit.engine.recorder import Recorder


def random_state() -> dict[str, bool]:
    """Whether setting the random state has an effect."""

    def sets(module: Any) -> bool:
        state = torch.get_rng_state()
        torch.rand(3)
        module._set_cuda_rng_state(state)
        return torch.equal(torch.get_rng_state(), state)

    spec = importlib.util.find_spec(random.__name__)
    assert spec is not None and spec.loader is not None
    untouched = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(untouched)
    mended = sets(random)
    return {"upstream": sets(untouched), "mended": mended}


def exchanges(*, model: str, samples: str) -> dict[str, int]:
    """Collectives over gradients and weights in a step; those over single numbers do not count."""
    training = start(model=model, samples=samples)
    training.stepper.train_step(training.batches.step(0))
    with Recorder() as seen:
        training.stepper.train_step(training.batches.step(1))
    large = [name for name, shapes in seen.calls if "reduce_scatter" in name or "allgather" in name]
    return {"dp": dist.get_world_size(), "collectives": len(large)}


def gloo_threads() -> dict[str, int]:
    """Polling threads of three groups, with torch's class and with ours; ours have started with the world."""

    def count() -> int:
        return sum(path.read_text() == "gloo_tcp_loop\n" for path in Path("/proc/self/task").glob("*/comm"))

    before = count()
    groups = [dist.new_group([0]) for _ in range(3)]
    shared = count()
    store = dist.HashStore()
    limit = timedelta(seconds=10)
    upstream = [dist.ProcessGroupGloo(dist.PrefixStore(str(k), store), 0, 1, limit) for k in range(3)]
    deadline = time.monotonic() + 10.0
    while count() < shared + len(upstream) and time.monotonic() < deadline:  # a thread names itself after its start
        time.sleep(0.01)
    values = {"upstream": count() - shared, "shared": shared - before, "groups": len(groups) + len(upstream)}
    for group in groups:
        dist.destroy_process_group(group)
    return values


def adam_with_apex(*, model: str, samples: str, root: str) -> dict[str, Any]:
    """If Apex is installed: the class that Megatron-Core takes, the one in our optimizer, and its steps after a resume.

    Reloads modules of Megatron-Core, so the process is of no use afterwards.
    """
    apex, optimizers = ModuleType("apex"), ModuleType("apex.optimizers")
    vars(optimizers).update(FusedAdam=type("FusedAdam", (torch.optim.AdamW,), {}), FusedSGD=torch.optim.SGD)
    with patch.dict(sys.modules, {"apex": apex, "apex.optimizers": optimizers}):
        importlib.reload(distrib_optimizer)
        importlib.reload(megatron.core.optimizer)
    upstream = [megatron.core.optimizer.Adam.__name__, distrib_optimizer.HAVE_APEX_OR_TE]
    training, fresh = (start(model=model, samples=samples) for _ in range(2))
    training.stepper.train_step(training.batches.step(0))
    parallel = training.model.plan.parallel
    folder = save_load.save(
        Path(root), training.stepper, run_state.Progress(step=1, data=""), parallel, SaveOptions(keep=1)
    )
    save_load.load(folder, fresh.stepper, parallel)
    (adam,) = torch_optimizers(fresh.stepper.optimizer)
    steps = {float(state["step"]) for state in adam.state.values()}
    return {"upstream": upstream, "mended": type(adam).__name__, "steps": sorted(steps)}


def read_by_megatron_core(*, model: str, samples: str, root: str) -> list[dict[str, int]]:
    """Save after a step, load with Megatron-Core's reader into a new optimizer, and compare the tensors.

    Two pipeline stages of a tied model: the last one has a padded bucket.
    """
    layout: dict[str, Any] = {"model": model, "samples": samples, "pp": 2, "micro_batch_size": 2}
    training = start(**layout)
    training.stepper.train_step(training.batches.step(0))
    parallel = training.model.plan.parallel
    folder = save_load.save(
        Path(root), training.stepper, run_state.Progress(step=1, data=""), parallel, SaveOptions(keep=1)
    )
    saved, fresh = training.stepper, start(**layout).stepper
    (optimizer,), (expected,) = distributed_optimizers(fresh.optimizer), distributed_optimizers(saved.optimizer)
    weights = fresh.model[0].module.sharded_state_dict(metadata=run_state.sharding_metadata())
    state = optimizer.sharded_state_dict(weights, is_loading=True, metadata=run_state.sharding_metadata())
    loaded = dist_checkpointing.load({"optimizer": state}, str(folder), validate_access_integrity=False)
    steps = [value.pop("step") for value in optimizer.optimizer.state.values()]  # its reader expects no such key
    optimizer.load_parameter_state_from_fully_reshardable(loaded["optimizer"]["param_state"])
    pairs = zip(_state_of(optimizer), _state_of(expected), strict=True)
    differences = sum(not torch.equal(read, written) for read, written in pairs)
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, {"parameters": len(steps), "differences": differences})
    return gathered


def _state_of(optimizer: Any) -> list[torch.Tensor]:
    adam = optimizer.optimizer
    parameters = [parameter for group in adam.param_groups for parameter in group["params"]]
    moments = [adam.state[parameter][name] for parameter in parameters for name in ("exp_avg", "exp_avg_sq")]
    return [tensor.detach() for tensor in (*parameters, *moments)]
