"""Checkpoints in Megatron's ``torch_dist`` format, readable under any layout."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeAlias

from megatron.core.dist_checkpointing.dict_utils import merge
from megatron.core.dist_checkpointing.mapping import apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.utils import extract_sharded_base

from isthmus.config.schema.parallel import ParallelConfig
from isthmus.engine.checkpoint.checkpoint_folder import read_errors
from isthmus.engine.checkpoint.checkpoint_writer import SaveOptions, take_state
from isthmus.engine.checkpoint.common_state import read_common_state
from isthmus.engine.checkpoint.entry_reader import EntryReader
from isthmus.engine.checkpoint.opened_checkpoint import OpenedCheckpoint, opened_checkpoint
from isthmus.engine.checkpoint.optimizer_state import set_num_updates
from isthmus.engine.checkpoint.run_state import (
    BestLoss,
    Progress,
    adapters_of,
    by_muon,
    layout_of,
    random_state,
    restore_random_state,
    sharded_run_state,
    stages_of,
)
from isthmus.engine.optim.adamw import float32_moments
from isthmus.engine.optim.optimizer import chain, torch_optimizers
from isthmus.engine.parallel.fsdp import FullyShardedDataParallel
from isthmus.engine.parallel.process_groups import agree
from isthmus.engine.step import Stepper
from isthmus.errors import DataError, UsageError

Fetch: TypeAlias = Callable[[Collection[str]], None]
"""Gets the files of these names from other machines; a collective."""


def save(root: Path, stepper: Stepper, progress: Progress, parallel: ParallelConfig, options: SaveOptions) -> Path:
    """Write weights, optimizer, random state and data position; every rank calls it.

    ``parallel`` is saved with it: the random state is only restored under the same layout.

    Raises:
        NoSpace, IOFailure: on every rank, if any rank fails to write; nothing is published.
    """
    writer = take_state(root, stepper, progress, parallel, options)
    writer.complete()
    return writer.final


def load(folder: Path, stepper: Stepper, parallel: ParallelConfig, fetch: Fetch = lambda _: None) -> Progress:
    """Load a checkpoint of any layout; every rank calls it.

    ``fetch`` is called with the names of the files that this rank reads, before their content is needed.

    Raises:
        MissingInput, DataError: the checkpoint is missing, truncated or of another model.
        UnsafeInput: loading it would run code.
        UsageError: other tensors were trained, or by another optimizer.
    """
    with opened_checkpoint(folder) as checkpoint:
        return _load(checkpoint, stepper, parallel, fetch)


def _load(checkpoint: OpenedCheckpoint, stepper: Stepper, parallel: ParallelConfig, fetch: Fetch) -> Progress:
    folder = checkpoint.folder
    with read_errors(folder):
        common = read_common_state(folder, checkpoint.index, checkpoint.verifier)
    if "isthmus" not in common:
        raise DataError(f"{folder} was not written by an Isthmus run, so its data position is unknown.")
    _check_same_training(common["isthmus"], stepper, folder)
    same_layout = common["isthmus"]["layout"] == layout_of(parallel)
    with read_errors(folder), float32_moments(torch_optimizers(stepper.optimizer), loading=True):
        state = sharded_run_state(stepper, is_loading=True)
        if same_layout:
            state["rng_state"] = random_state(stepper.device)
        loaded = load_entries(state, checkpoint, fetch)
        in_place = isinstance(stepper.model[0], FullyShardedDataParallel) or adapters_of(stepper) is not None
        for name, stage in () if in_place else stages_of(stepper).items():
            stage.load_state_dict(loaded[name])
    saved = common["optimizer"].get(0, common["optimizer"])  # several optimizers are keyed by number
    done = common["isthmus"]["progress"]
    best = {"last_step": done["step"], **done.get("best", {})}
    progress = Progress(step=done["step"], data=done["data"], best=BestLoss(**best))
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


def load_entries(state: dict[str, Any], checkpoint: OpenedCheckpoint, fetch: Fetch = lambda _: None) -> dict[str, Any]:
    """Load the sharded entries in ``state``; a collective.

    All ranks check the blocks that they read against their checksums, before any reads.
    """
    sharded, local, factories = load_preprocess(state)
    entries, _ = extract_sharded_base(sharded)
    reader = EntryReader(checkpoint, entries)

    def find() -> None:
        with read_errors(checkpoint.folder):
            reader.find()

    def check() -> None:
        with read_errors(checkpoint.folder):
            reader.check()

    def read() -> None:
        with read_errors(checkpoint.folder):
            merge(local, reader.read())

    agree(find)
    fetch(reader.files())
    agree(check)
    agree(read)
    return apply_factory_merges(local, factories)


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
