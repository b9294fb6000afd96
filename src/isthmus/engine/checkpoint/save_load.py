"""Checkpoints in Megatron's ``torch_dist`` format, readable under any layout.

A checkpoint is written to a temporary folder, and renamed when all ranks are done and all files are complete.
"""

from __future__ import annotations

import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint as dcp

from isthmus.atomic_write import TEMPORARY
from isthmus.config.schema.parallel import ParallelConfig
from isthmus.engine.checkpoint.checkpoint_folder import check_files, checkpoint_dir, publish, read_errors, write_errors
from isthmus.engine.checkpoint.optimizer_state import set_num_updates
from isthmus.engine.checkpoint.run_state import (
    BestLoss,
    Progress,
    adapters_of,
    by_muon,
    layout_of,
    random_state,
    restore_random_state,
    saved_state,
    sharded_run_state,
    sharding_metadata,
    stages_of,
)
from isthmus.engine.optim.adamw import float32_moments
from isthmus.engine.optim.optimizer import chain, torch_optimizers
from isthmus.engine.parallel.fsdp import FullyShardedDataParallel
from isthmus.engine.parallel.process_groups import agree
from isthmus.engine.step import Stepper
from isthmus.engine.upstream.compat import load_objects_without_code
from isthmus.errors import DataError, IsthmusError, UsageError


class _SynchronousSave(TorchDistSaveShardedStrategy):
    """Megatron-Core's asynchronous writer forks, and can publish a file that a failed thread left incomplete."""

    def __init__(self) -> None:
        super().__init__("torch_dist", 1, thread_count=1)

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        state, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        dcp.save(
            mcore_to_pyt_state_dict(state, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir, thread_count=1, sync_files=True),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(
    root: Path,
    stepper: Stepper,
    progress: Progress,
    parallel: ParallelConfig,
    *,
    keep: int,
    keep_best: bool = False,
    args: Namespace | None = None,
    write_beside: Callable[[Path], None] | None = None,
) -> Path:
    """Write weights, optimizer, random state and data position; every rank calls it.

    Args:
        parallel: saved with it; the random state is only restored under the same layout.
        keep: number of checkpoints to keep; older ones are removed when this one is complete.
        keep_best: keep that of ``progress.best`` in addition.
        args: model description for Megatron-LM and for conversion.
        write_beside: writes more files into the folder, on rank 0.

    Raises:
        NoSpace, IOFailure: on every rank, if any rank fails to write; nothing is published.
    """
    final = checkpoint_dir(root, progress.step)
    staging = root / f"{TEMPORARY}{final.name}"
    main = dist.get_rank() == 0

    def prepare() -> None:
        shutil.rmtree(staging, ignore_errors=True)
        staging.mkdir(parents=True)

    _on_main(prepare, staging)
    state = saved_state(stepper, progress, parallel, args)
    content = {name: value for name, value in sharding_metadata().items() if name != "dp_cp_group"}

    def write() -> None:
        with write_errors(staging):
            dist_checkpointing.save(state, str(staging), _SynchronousSave(), content_metadata=content)
            if main:
                if write_beside is not None:
                    write_beside(staging)
                check_files(staging)

    try:
        agree(write)
    except IsthmusError:
        if main:
            shutil.rmtree(staging, ignore_errors=True)
        raise
    best = progress.best.step if keep_best else None
    _on_main(lambda: publish(staging, final, progress.step, keep, best), staging)
    return final


def _on_main(stage: Callable[[], None], staging: Path) -> None:
    """Run ``stage`` on rank 0; every rank waits for it and raises its error."""

    def run() -> None:
        with write_errors(staging):
            stage()

    agree(run if dist.get_rank() == 0 else lambda: None)


def load(folder: Path, stepper: Stepper, parallel: ParallelConfig) -> Progress:
    """Load a checkpoint of any layout; every rank calls it.

    Raises:
        MissingInput, DataError: the checkpoint is missing, truncated or of another model.
        UnsafeInput: loading it would run code.
        UsageError: other tensors were trained, or by another optimizer.
    """
    check_files(folder)
    load_objects_without_code()
    with read_errors(folder):
        common = dist_checkpointing.load_common_state_dict(str(folder))
    if "isthmus" not in common:
        raise DataError(f"{folder} was not written by an Isthmus run, so its data position is unknown.")
    _check_same_training(common["isthmus"], stepper, folder)
    same_layout = common["isthmus"]["layout"] == layout_of(parallel)
    with read_errors(folder), float32_moments(torch_optimizers(stepper.optimizer), loading=True):
        state = sharded_run_state(stepper, is_loading=True)
        if same_layout:
            state["rng_state"] = random_state(stepper.device)
        loaded = dist_checkpointing.load(state, str(folder), validate_access_integrity=False)
        in_place = isinstance(stepper.model[0], FullyShardedDataParallel) or adapters_of(stepper) is not None
        for name, stage in () if in_place else stages_of(stepper).items():
            stage.load_state_dict(loaded[name])
    saved = common["optimizer"].get(0, common["optimizer"])  # several optimizers are keyed by number
    done = common["isthmus"]["progress"]
    progress = Progress(step=done["step"], data=done["data"], best=BestLoss(**done.get("best", {})))
    stepper.skipped = common["isthmus"].get("skipped", 0)
    stepper.schedule.step(increment=progress.step - stepper.skipped)
    for adam in torch_optimizers(stepper.optimizer):
        set_num_updates(adam, progress.step - stepper.skipped)
    for optimizer in chain(stepper.optimizer):
        if getattr(optimizer, "grad_scaler", None) is not None and "grad_scaler" in saved:
            optimizer.grad_scaler.load_state_dict(saved["grad_scaler"])
    if same_layout:
        restore_random_state(loaded["rng_state"][0], stepper.device)
    return progress


def _check_same_training(saved: dict[str, Any], stepper: Stepper, folder: Path) -> None:
    """Raise UsageError if other tensors were trained, or by another optimizer; ``saved`` is written by :func:`save`."""
    if saved.get("adapters") != adapters_of(stepper):
        raise UsageError(
            f"{folder} was saved with other adapters (section lora). Resume with the same settings, or start a new run "
            "with lora.path."
        )
    if saved.get("frozen", []) != sorted(stepper.model[0].module.frozen):
        setting = "train.freeze" if saved.get("adapters") is None else "lora.modules_to_save"
        raise UsageError(
            f"{folder} was saved with another {setting}, so it has the optimizer state of other tensors. Resume "
            f"with the same {setting}, or start a new run from its exported model."
        )
    if saved.get("muon", False) != by_muon(stepper):
        before, now = ("adamw", "muon") if by_muon(stepper) else ("muon", "adamw")
        raise UsageError(
            f"{folder} has the optimizer state of {before}, and this run uses {now}. Resume with the same "
            "optim.optimizer, or start a new run from its exported model."
        )
