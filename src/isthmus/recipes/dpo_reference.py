"""The reference of a run on preferences: what its starting weights make of every answer, found once and kept."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch

from isthmus.atomic_write import atomic_file
from isthmus.config.schema import RunConfig
from isthmus.data.batching.pair_batches import PairBatches
from isthmus.engine.parallel.process_groups import Position, agree, sum_over_ranks
from isthmus.errors import Preempted, UsageError
from isthmus.families.architecture import Architecture
from isthmus.train.stop import StopFlag

if TYPE_CHECKING:
    from isthmus.engine.objective import Objective, PackedLine
    from isthmus.engine.step import Stepper


def objective_of(config: RunConfig) -> Objective:
    """What a run of this recipe minimises."""
    from isthmus.engine.objective import NEXT_TOKEN
    from isthmus.train.preference_loss import Preference

    if config.recipe != "dpo":
        return NEXT_TOKEN
    return Preference(config.dpo)


def check_preference(config: RunConfig, architecture: Architecture) -> None:
    """Refuse models that a loss over pairs does not train whole.

    Raises:
        UsageError: the model has layers that predict ahead.
    """
    if config.recipe == "dpo" and architecture.mtp_layers:
        raise UsageError(
            f"this model has {architecture.mtp_layers} layers that predict ahead ({architecture.family}), and a "
            "preference between whole answers has no loss for them. Take them out of the folder (their number in "
            "config.json, and their tensors), or fine-tune with sft."
        )


def find_reference(
    stepper: Stepper,
    parts: dict[str, PairBatches],
    path: Path,
    position: Position,
    *,
    fresh: bool,
    stop: StopFlag,
    say: Callable[[str], None],
) -> None:
    """Give each part its :attr:`~isthmus.data.batching.pair_batches.PairBatches.reference`; every rank calls it.

    Args:
        stepper: of the model, which still has the weights that the run starts from.
        parts: the pairs to train on, and those held out, by name.
        path: where it is kept. What lies there is taken where it is of the same pairs.
        position: of this rank.
        fresh: the run starts from its first step, so what lies there is of another start, perhaps of other weights.
        stop: looked at between two batches.
        say: told what is done.

    Raises:
        NoSpace, IOFailure: on every rank, when it cannot be kept.
        Preempted: on every rank, once any was asked to stop.
    """
    kept = {} if fresh else _read(path)
    wanted = {name: part.store.digest() for name, part in parts.items()}
    found = {name: kept[digest] for name, digest in wanted.items() if digest in kept}
    for name, part in parts.items():
        if name not in found:
            say(f"reference: the starting weights' log-probabilities of {len(part.store)} answers ({name})")
            found[name] = _pass_over(stepper, part, position, stop)
        part.reference = torch.from_numpy(found[name])

    def write() -> None:
        if position.rank == 0 and set(wanted.values()) != kept.keys():
            _write(path, {digest: found[name] for name, digest in wanted.items()})

    agree(write)


def _read(path: Path) -> dict[str, npt.NDArray[np.float64]]:
    """By the digest of the pairs they are of; empty where there is nothing that can be read."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, BadZipFile):
        return {}


def _write(path: Path, arrays: dict[str, Any]) -> None:
    with atomic_file(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **arrays)


def _pass_over(stepper: Stepper, part: PairBatches, position: Position, stop: StopFlag) -> npt.NDArray[np.float64]:
    from isthmus.train.preference_loss import Recorder

    recorder = Recorder(len(part.store))
    stepper.means(_until(stop, part.eval_batches()), recorder)
    # Ranks that share a line have found the same.
    counts_here = position.tp_rank == position.cp_rank == 0
    return np.asarray(sum_over_ranks((recorder.found * counts_here).tolist()), dtype=np.float64)


def _until(stop: StopFlag, batches: Iterator[Sequence[PackedLine]]) -> Iterator[Sequence[PackedLine]]:
    """The batches, of which there may be hours."""
    for lines in batches:
        (asked,) = sum_over_ranks([float(stop.requested)])
        if asked:
            raise Preempted("stopped before the first step, as asked. The same command begins again.")
        yield lines
