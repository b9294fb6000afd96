"""The state of a run in a checkpoint, independent of the layout except for the random state."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

from isthmus.config.schema.parallel import ParallelConfig
from isthmus.engine.checkpoint.adapter_state import trained_entries, weights_of
from isthmus.engine.checkpoint.fsdp_state import sharded_state
from isthmus.engine.checkpoint.optimizer_state import distributed_state, grad_scaler_state
from isthmus.engine.lora.adapter import AdapterSet
from isthmus.engine.optim.adamw import float32_moments
from isthmus.engine.optim.optimizer import chain, distributed_optimizers, torch_optimizers
from isthmus.engine.parallel.ddp import gather_weights
from isthmus.engine.parallel.fsdp import FullyShardedDataParallel
from isthmus.engine.step import Stepper


@dataclass(slots=True)
class BestLoss:
    """The lowest validation loss after a step of a run."""

    loss: float | None = None
    step: int | None = None
    evaluations_since: int = 0
    last_step: int = 0
    """Step of the newest evaluation."""

    def update(self, step: int, loss: float) -> bool:
        """Whether ``loss`` is the lowest so far. An evaluation that a resumed run repeats counts once."""
        if step in (self.step, self.last_step):
            return False
        self.last_step = step
        if self.loss is None or loss < self.loss:
            self.loss, self.step, self.evaluations_since = loss, step, 0
            return True
        self.evaluations_since += 1
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    step: int
    data: str
    """Fingerprint of the data and its order."""
    best: BestLoss = field(default_factory=BestLoss)


def saved_state(
    stepper: Stepper, progress: Progress, parallel: ParallelConfig, args: Namespace | None
) -> dict[str, Any]:
    """Everything in a checkpoint except the files beside it."""
    with float32_moments(torch_optimizers(stepper.optimizer), loading=False):
        state = sharded_run_state(stepper, is_loading=False)
    state |= {
        "rng_state": random_state(stepper.device),
        "checkpoint_version": 3.0,
        "iteration": progress.step,
        "isthmus": {
            "progress": asdict(progress),
            "layout": layout_of(parallel),
            "skipped": stepper.skipped,
            "frozen": sorted(stepper.model[0].module.frozen),
            "adapters": adapters_of(stepper),
            "muon": by_muon(stepper),
        },
    }
    return state if args is None else state | {"args": args}


def sharded_run_state(stepper: Stepper, *, is_loading: bool) -> dict[str, Any]:
    """The sharded state to save or load; for loading, ``optimizers`` is always a list."""
    if stepper.device.type == "cuda":
        torch.cuda.synchronize()  # moments in host memory may still be copied
    if isinstance(fsdp_model := stepper.model[0], FullyShardedDataParallel):  # without pipeline stages
        (adam,) = torch_optimizers(stepper.optimizer)
        return sharded_state(fsdp_model, adam, is_loading=is_loading)
    gather_weights(stepper.model)
    # Keyed by stage; keys in the files have model-wide layer numbers.
    if stepper.model[0].module.adapters is None:
        entries = {
            name: stage.sharded_state_dict(metadata=sharding_metadata()) for name, stage in stages_of(stepper).items()
        }
        state = entries
    else:
        entries = {name: trained_entries(stage, sharding_metadata()) for name, stage in stages_of(stepper).items()}
        state = {name: weights_of(stage_entries) for name, stage_entries in entries.items()}
    stacked = not stepper.model[0].module.frozen
    states = [distributed_state(part, entries, stacked=stacked) for part in distributed_optimizers(stepper.optimizer)]
    if is_loading:
        return state | {"optimizers": states}
    if not states:  # all tensors of this rank are frozen
        states = [grad_scaler_state(chain(stepper.optimizer)[0])]
    # Several are keyed by number, like Megatron-Core's chain, which would also save empty ones and fail.
    return state | {"optimizer": states[0] if len(states) == 1 else dict(enumerate(states))}


def sharding_metadata() -> dict[str, Any]:
    return {
        "distrib_optim_sharding_type": "fully_reshardable",
        "singleton_local_shards": False,
        "chained_optim_avoid_prefix": True,
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }


def random_state(device: torch.device) -> ShardedObject:
    """One entry per (pp, tp) rank, as in Megatron-LM."""
    state = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
    if device.type == "cuda":
        state["device"] = torch.cuda.get_rng_state()
    return ShardedObject(
        "rng_state",
        [state],
        (
            parallel_state.get_pipeline_model_parallel_world_size(),
            parallel_state.get_tensor_model_parallel_world_size(),
        ),
        (parallel_state.get_pipeline_model_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    get_cuda_rng_tracker().set_states(state["tracker"])
    if "device" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["device"])


def adapters_of(stepper: Stepper) -> list[str] | None:
    """The tensors of the adapters of all stages; None without adapters."""
    adapters: AdapterSet | None = stepper.model[0].module.adapters
    return None if adapters is None else adapters.described()


def stages_of(stepper: Stepper) -> dict[str, Any]:
    if len(stepper.model) == 1:
        return {"model": stepper.model[0].module}
    return {f"model{number}": stage.module for number, stage in enumerate(stepper.model)}


def layout_of(parallel: ParallelConfig) -> dict[str, Any]:
    names = ("tp", "pp", "vpp", "cp", "ep", "etp", "fsdp")
    layout = {name: getattr(parallel, name) for name in names}
    return layout | {"sp": parallel.sequence_parallel, "world_size": dist.get_world_size()}


def by_muon(stepper: Stepper) -> bool:
    return hasattr(stepper.optimizer, "muon")
