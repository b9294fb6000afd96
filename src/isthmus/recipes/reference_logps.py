"""Log-probabilities of answers under the reference model of DPO and KTO."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt
import torch

from isthmus.data.batching.batches import AnswerBatches, Batches, UnpairedBatches
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.loss.preference_loss import LogProbRecorder
from isthmus.engine.parallel.process_groups import Position, agree, sum_over_ranks
from isthmus.engine.step import Stepper
from isthmus.errors import Preempted
from isthmus.files.atomic_write import atomic_file
from isthmus.files.input_files import check_uncompressed
from isthmus.train.stop import StopFlag


def compute_reference(
    stepper: Stepper,
    parts: Mapping[str, Batches | None],
    path: Path,
    position: Position,
    *,
    fresh: bool,
    stop: StopFlag,
    log: Callable[[str], None],
) -> None:
    """Set :attr:`~isthmus.data.batching.batches.AnswerBatches.reference` of each part; a collective.

    The policy with its starting weights is the reference model. ``path`` caches the log-probabilities by the digest of
    the answers; ``fresh`` ignores the cache, which may belong to other weights. Preempted and write errors are raised
    on every rank.
    """
    cache = {} if fresh else _read(path)
    answers = {name: part for name, part in parts.items() if isinstance(part, AnswerBatches)}
    unpaired = {name: part for name, part in answers.items() if isinstance(part, UnpairedBatches)}
    answers |= {f"{name}, mismatched": part.mismatched for name, part in unpaired.items()}
    digests = {name: part.store.digest() for name, part in answers.items()}
    logps = {name: cache[digest] for name, digest in digests.items() if digest in cache}
    for name, part in answers.items():
        if name not in logps:
            log(f"reference: log-probabilities of {len(part.store)} answers under the starting weights ({name})")
            logps[name] = _reference_logps(stepper, part, position, stop)
        part.reference = torch.from_numpy(logps[name])

    def write() -> None:
        if position.rank == 0 and set(digests.values()) != cache.keys():
            with atomic_file(path) as temporary, temporary.open("wb") as file:
                arrays: dict[str, Any] = {digest: logps[name] for name, digest in digests.items()}
                np.savez(file, **arrays)

    agree(write)


def _read(path: Path) -> dict[str, npt.NDArray[np.float64]]:
    """Log-probabilities by the digest of their answers; empty without a readable cache."""
    try:
        check_uncompressed(path)
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, MemoryError, BadZipFile):
        return {}


def _reference_logps(
    stepper: Stepper, part: AnswerBatches, position: Position, stop: StopFlag
) -> npt.NDArray[np.float64]:
    """Summed log-probability of each answer, float64 [samples]."""
    recorder = LogProbRecorder(len(part.store))
    stepper.evaluate(_until_stopped(stop, part.eval_batches(), stepper.device), recorder)
    # Tensor and context parallel ranks have the same values.
    counts = position.tp_rank == position.cp_rank == 0
    return np.asarray(sum_over_ranks((recorder.logps * counts).tolist(), stepper.device), dtype=np.float64)


def _until_stopped(
    stop: StopFlag, batches: Iterator[Sequence[PackedBatch]], device: torch.device
) -> Iterator[Sequence[PackedBatch]]:
    for micro_batches in batches:
        (stops,) = sum_over_ranks([float(stop.requested)], device)
        if stops:
            raise Preempted("stopped before the first step, as requested. The same command starts again.")
        yield micro_batches
