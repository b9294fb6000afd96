"""Run in a rank's process: does megatron-core still have the defects of upstream/compat.py?

Each returns the result of upstream alone, and with the workaround.
"""

from __future__ import annotations

import importlib.util
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.tensor_parallel import random

from isthmus.engine.checkpoint import save_load
from isthmus.engine.optim.optimizer import distributed_optimizers
from isthmus.engine.upstream import compat
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


def state_before_the_first_step(*, model: str, samples: str) -> dict[str, Any]:
    """The state dict of the optimizer before the first step."""
    (optimizer,) = distributed_optimizers(start(model=model, samples=samples).stepper.optimizer)
    optimizer.optimizer.state.clear()  # as upstream leaves it
    try:
        optimizer.state_dict()
    except AssertionError:
        upstream = "fails"
    else:
        upstream = "works"
    compat.fill_adam_state(optimizer.optimizer)
    return {"upstream": upstream, "mended": optimizer.state_dict()["optimizer"]["param_groups"][0]["step"]}


def loss_scales() -> dict[str, list[float]]:
    """Of two optimizers in a chain, when only the second one's gradients have overflowed."""
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    from megatron.core.optimizer.optimizer import ChainedOptimizer, MixedPrecisionOptimizer

    class Of(MixedPrecisionOptimizer):
        """With Megatron-Core's own step, up to what its gradients are."""

        def __init__(self, *, overflows: bool) -> None:
            self.config, self.is_stub_optimizer, self.overflows = SimpleNamespace(timers=None), False, overflows
            self.grad_scaler = DynamicGradScaler(64.0, 1.0, 2.0, 0.5, 1000, 1)

        def _copy_model_grads_to_main_grads(self) -> None:
            pass

        def _unscale_main_grads_and_check_for_nan(self) -> bool:
            return self.overflows

    for name in Of.__abstractmethods__:
        setattr(Of, name, None)
    Of.__abstractmethods__ = frozenset()
    chain = ChainedOptimizer([])
    chain.chained_optimizers = [Of(overflows=False), Of(overflows=True)]
    chain.step()

    def scales() -> list[float]:
        return [float(optimizer.grad_scaler.scale) for optimizer in chain.chained_optimizers]

    upstream = scales()
    compat.sync_loss_scales(chain)
    return {"upstream": upstream, "mended": scales()}


def clipping() -> dict[str, Any]:
    """Largest tensor that clipping makes of a gradient of 1000 elements, and the norm and gradient it yields."""
    from megatron.core.optimizer import clip_grads
    from megatron.core.utils import local_multi_tensor_l2_norm, local_multi_tensor_scale

    def clip() -> dict[str, Any]:
        grad = torch.full((1000,), 2.0)
        weight = torch.nn.Parameter(torch.zeros(1000))
        weight.grad = grad
        norm = clip_grads.get_grad_norm_fp32([grad])
        with Recorder() as seen:
            clip_grads.clip_grad_by_total_norm_fp32([weight], 1.0, norm)
        return {"made": seen.largest(torch.float32), "norm": float(norm), "left": float(grad.norm())}

    clip_grads.l2_norm_impl = local_multi_tensor_l2_norm
    clip_grads.multi_tensor_scale_impl = local_multi_tensor_scale
    upstream = clip()
    compat.clip_in_place()
    return {"upstream": upstream, "mended": clip()}


def exchanges(*, model: str, samples: str) -> dict[str, int]:
    """Collectives over gradients and weights in a step; those over single numbers do not count."""
    training = start(model=model, samples=samples)
    training.stepper.train_step(training.batches.step(0))
    with Recorder() as seen:
        training.stepper.train_step(training.batches.step(1))
    large = [name for name, shapes in seen.taken if "reduce_scatter" in name or "allgather" in name]
    return {"dp": dist.get_world_size(), "collectives": len(large)}


def loading(*, model: str, samples: str, root: str) -> dict[str, Any]:
    """Save after a step, then load into a new optimizer: into how many places its step counts go, and what they are."""
    layout = {"model": model, "samples": samples}
    training = start(**layout)
    training.stepper.train_step(training.batches.step(0))
    parallel = training.model.plan.parallel
    folder = save_load.save(Path(root), training.stepper, save_load.Progress(step=1, data=""), parallel, keep=1)
    return {"upstream": _load(folder, layout, mended=False), "mended": _load(folder, layout, mended=True)}


def _load(folder: Path, layout: dict[str, Any], *, mended: bool) -> Any:
    stepper = start(**layout).stepper
    (optimizer,) = distributed_optimizers(stepper.optimizer)
    state = save_load._state(stepper, is_loading=True)
    state["optimizer"] = state.pop("optimizers")[0]
    loaded = dist_checkpointing.load(state, str(folder), validate_access_integrity=False)["optimizer"]
    try:
        if mended:
            compat.load_adam(optimizer, loaded["param_state"], steps=1)
        else:
            optimizer.load_state_dict(loaded)
    except (KeyError, AssertionError) as error:
        return type(error).__name__
    steps = [state["step"] for state in optimizer.optimizer.state.values()]
    return [len({step.data_ptr() for step in steps}) == len(steps), sorted({step.item() for step in steps})]


def misplaced(*, model: str, samples: str) -> dict[str, int]:
    """On the last of two stages of a tied model: parameters of which something else would be saved."""
    import torch.distributed as dist

    training = start(model=model, samples=samples, pp=2, micro_batch_size=2)
    training.stepper.train_step(training.batches.step(0))
    (optimizer,) = distributed_optimizers(training.stepper.optimizer)
    found = {"upstream": _misplaced(training, optimizer)}
    compat.keep_bucket_padding(optimizer)
    compat.keep_bucket_padding(optimizer)
    found["mended"] = _misplaced(training, optimizer)
    every: list[dict[str, int]] = [{}] * dist.get_world_size()
    dist.all_gather_object(every, found)
    return every[-1]


def _misplaced(training: Any, optimizer: Any) -> int:
    weights = training.stepper.model[0].module.sharded_state_dict(metadata=save_load._metadata())
    state = optimizer.sharded_state_dict(weights, metadata=save_load._metadata())["param_state"]
    (buffer,) = optimizer.buffers
    pairs = zip(buffer.param_index_map, state.values(), strict=True)
    return sum(not torch.equal(parameter.detach(), tensors["param"].data) for parameter, tensors in pairs)


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
    found = {"upstream": count() - shared, "shared": shared - before, "groups": len(groups) + len(upstream)}
    for group in groups:
        dist.destroy_process_group(group)
    return found
