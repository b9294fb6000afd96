"""Other weights of the model in a checkpoint, beside its own: each rank has a copy of some of its parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from torch import Tensor, nn

from isthmus.engine.checkpoint.adapter_state import trained_entries
from isthmus.engine.checkpoint.checkpoint_folder import read_errors
from isthmus.engine.checkpoint.opened_checkpoint import opened_checkpoint
from isthmus.engine.checkpoint.optimizer_state import is_tensor, local_entries
from isthmus.engine.checkpoint.run_state import sharding_metadata, stages_of
from isthmus.engine.checkpoint.save_load import load_entries
from isthmus.engine.parallel.fsdp import FullyShardedDataParallel
from isthmus.engine.parallel.sharded_params import copy_number, elements_before
from isthmus.engine.step import Stepper

Copies: TypeAlias = Sequence[tuple[nn.Parameter, Tensor]]
"""Parameters of this rank, and other values of their local elements, flat."""


def copied_entries(stepper: Stepper, copies: Copies, name: str) -> dict[str, ShardedTensor]:
    """Checkpoint entries of the copies, in any layout; their keys begin with ``name``."""
    result: dict[str, ShardedTensor] = {}
    entries = _entries(stepper)
    for number, (parameter, copy) in enumerate(copies):
        entry, start, copy_of_rows = entries[parameter]
        named = replace(entry, key=f"{name}.{entry.key}")
        for part, piece in enumerate(local_entries(named, copy, start, stacked=False, copy=copy_of_rows or 0)):
            replica = entry.replica_id if copy_of_rows is None else piece.replica_id
            result[f"{name}.{number}.{part}"] = replace(piece, replica_id=replica)
    return result


def load_copies(folder: Path, stepper: Stepper, copies: Copies, name: str) -> None:
    """Set the copies to those in a checkpoint of any layout; a collective.

    Raises:
        DataError: the checkpoint does not have them, or is damaged.
    """
    with opened_checkpoint(folder) as checkpoint, read_errors(folder):
        load_entries(dict(copied_entries(stepper, copies, name)), checkpoint)


def _entries(stepper: Stepper) -> dict[Any, tuple[Any, int, int | None]]:
    """The entry of each whole parameter, the elements before this rank's, and the copy that FSDP has rows of."""
    model = stepper.model[0]
    if isinstance(model, FullyShardedDataParallel):
        parameters = model.module.named_parameters()
        return {
            tensor: (model.sharded_tensors[name], elements_before(tensor), copy_number(tensor))
            for name, tensor in parameters
        }
    result: dict[Any, tuple[Any, int, int | None]] = {}
    for stage in stages_of(stepper).values():
        entries = [*stage.sharded_state_dict(metadata=sharding_metadata()).values()]
        if stage.adapters is not None:
            entries += trained_entries(stage, sharding_metadata()).values()
        result |= {entry.data: (entry, 0, None) for entry in entries if is_tensor(entry)}
    return result
