"""Compares two models on disk in any formats: configs, tensors bit by bit, and optionally logits."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.convert.canonical import Progress, stream, unique_placements
from isthmus.convert.coverage import first_few
from isthmus.convert.family_matching import differing_fields
from isthmus.convert.hf.hf_weights import has_bin
from isthmus.convert.open_model import OpenedModel, checkpoint_folder, open_model
from isthmus.convert.verify.compare_logits import LogitsCheck, LogitsDifference, compare_logits
from isthmus.convert.weight_source import TensorSpec
from isthmus.errors import CheckFailed, MissingInput, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Placement
from isthmus.families.rules.rule import Shape
from isthmus.families.rules.shard import hf_slices
from isthmus.files.checked_files import ChecksumVerifier
from isthmus.hf.tensors.safetensors_format import byte_view

_INT_BY_ITEMSIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """Result of the comparison of two equal models."""

    formats: tuple[str, str]
    family: str
    num_tensors: int
    num_bytes: int
    checksums: tuple[bool, ...]
    """Whether the folder of each model has checksums; reads are checked if so."""
    logits: LogitsDifference | None = None

    def as_dict(self) -> dict[str, Any]:
        """All fields by name; the last is always ``identical``, since a difference raises CheckFailed."""
        fields = asdict(self)
        logits = fields.pop("logits") or {}
        return fields | {
            "logits_max_abs": logits.get("max_abs"),
            "logits_mean_kl_nats": logits.get("mean_kl_nats"),
            "logits_run": logits.get("how"),
            "result": "identical",
        }


class TensorDifferences:
    """Hugging Face tensors that differ in dtype, or in how many elements and by how much at most."""

    def __init__(self, arch: Architecture) -> None:
        self._arch = arch
        self._dtypes: dict[str, str] = {}
        self._elements: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()

    def compare(self, placed: Placement, rows: slice, a: Tensor, b: Tensor) -> None:
        """Compare rows of a canonical tensor bit by bit. Thread-safe."""
        if a.dtype != b.dtype:
            dtypes = " and ".join(str(side.dtype).removeprefix("torch.") for side in (a, b))
            self._dtypes |= dict.fromkeys(placed.hf, f"is {dtypes}")
            return
        if np.array_equal(byte_view(a), byte_view(b)):  # 8x faster than torch.equal
            return
        local = (slice(0, rows.stop - rows.start),)
        as_int = _INT_BY_ITEMSIZE[a.itemsize]
        with self._lock:  # several experts may be parts of one tensor
            for piece in hf_slices(placed.rule, self._arch, (rows,), local, placed.expert):
                ours, theirs = (piece.view(chunk).contiguous() for chunk in (a, b))
                if unequal := int((ours.view(as_int) != theirs.view(as_int)).sum()):
                    count, largest = self._elements.get(placed.hf[piece.part], (0, 0.0))
                    difference = (ours.double() - theirs.double()).abs().max().item()
                    largest = float(np.maximum(largest, difference))  # NaN if either is
                    self._elements[placed.hf[piece.part]] = count + unequal, largest

    def describe(self, shapes: Mapping[str, Shape]) -> list[str]:
        """One entry per tensor that differs."""
        return [f"{name} {dtypes}" for name, dtypes in self._dtypes.items()] + [
            f"{name} in {count} of {math.prod(shapes[name])} elements, by {largest:.3g} at most"
            for name, (count, largest) in self._elements.items()
        ]


@torch.no_grad()
def compare_models(
    first: Path,
    second: Path,
    *,
    hf_like: Path | None = None,
    bin: bool = False,
    logits: LogitsCheck | None = None,
    progress: Progress = lambda done, total: None,
) -> ModelComparison:
    """Compare two models: equal models have equivalent configs and bitwise equal tensors.

    Args:
        first: a Hugging Face folder or a Megatron checkpoint.
        second: the same.
        hf_like: config of a checkpoint that has none.
        bin: read ``pytorch_model*.bin`` instead of safetensors, where present.
        logits: also run both models and compare their logits, even if the models differ.
        progress: called with (bytes done, total bytes).

    Raises:
        CheckFailed: they differ; the message names where.
        DataError: one of them does not match its checksums.
        MissingInput, DataError, UnsafeInput, UsageError: one of them cannot be read or run.
    """
    if bin and not has_bin(first) and not has_bin(second):
        raise MissingInput(f"neither {first} nor {second} has pytorch_model*.bin. Omit --bin.")
    a, b = _open_both(first, second, hf_like, bin)
    config_differences = [f"{name}={ours} and {theirs}" for name, ours, theirs in differing_fields(a.arch, b.arch)]
    if a.family is not b.family:
        config_differences = [f"family {a.family.name} and {b.family.name}"]
    problems = [f"they are not the same model: {'; '.join(config_differences)}"] if config_differences else []
    comparison = None
    if not config_differences or (logits is not None and _shapes(a) == _shapes(b)):
        comparison, differing = _compare_tensors(a, b, progress)
        problems += [differing] if differing else []
        problems += _tower_differences(a, b)
    difference = None
    if logits is not None:
        try:
            difference = compare_logits(a, b, logits, progress)
        except UsageError as error:
            if not problems:
                raise
            problems.append(f"their logits were not compared: {str(error).rstrip('.')}")
    if problems or (difference is not None and not difference.same):
        problems += [str(difference)] if difference is not None else []
        raise CheckFailed(f"{first} and {second}: {'; '.join(problems)}.")
    assert comparison is not None
    return replace(comparison, logits=difference)


def _tower_differences(a: OpenedModel, b: OpenedModel) -> list[str]:
    if a.towers is not None and b.towers is not None:
        names = a.towers.differences(b.towers)
        return [f"their towers differ in {len(names)} tensors: {first_few(names)}"] if names else []
    multimodal = next((model for model in (a, b) if model.towers is not None and model.towers.tensors), None)
    if multimodal is None or multimodal.towers is None:
        return []
    return [
        f"only {multimodal.path} has towers, {len(multimodal.towers.tensors)} tensors. Name the folder of the whole "
        "model with --hf-like to compare the language models"
    ]


def _compare_tensors(a: OpenedModel, b: OpenedModel, progress: Progress) -> tuple[ModelComparison, str]:
    """Compare tensors of equal names and shapes; the string describes differences, if any."""
    sides = (a, b)
    placements = unique_placements(a.family, a.arch)
    specs = {name: TensorSpec(a.weights.dtype(name), shape) for name, shape in _shapes(a).items()}
    differences = TensorDifferences(a.arch)

    def compare(name: str, rows: slice) -> int:
        chunks = [side.weights.read(name, rows) for side in sides]
        differences.compare(placements[name], rows, *chunks)
        return chunks[0].nbytes

    total = sum(torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in specs.values())
    stream(specs, compare, total, progress)
    shapes = a.family.hf_shapes(a.arch)
    verifier = ChecksumVerifier()
    has_sums = tuple(
        any(verifier.has_list(folder) for folder in (side.path, checkpoint_folder(side.path) or side.path))
        for side in sides
    )
    comparison = ModelComparison((a.format, b.format), a.family.name, len(shapes), total, has_sums)
    if not (unequal := differences.describe(shapes)):
        return comparison, ""
    return comparison, f"they differ in {len(unequal)} of {len(shapes)} tensors: {first_few(unequal, '; ')}"


def _shapes(side: OpenedModel) -> dict[str, Shape]:
    placements = unique_placements(side.family, side.arch)
    return {name: placed.rule.canonical_shape(side.arch) for name, placed in placements.items()}


def _open_both(first: Path, second: Path, hf_like: Path | None, bin: bool) -> tuple[OpenedModel, OpenedModel]:
    """Apply ``--hf-like`` and ``--bin`` only where needed. A model with config supplies what another's args lack."""

    def opened(path: Path, alike: OpenedModel | None = None) -> OpenedModel:
        is_checkpoint = path.exists() and checkpoint_folder(path) is not None
        return open_model(path, hf_like=hf_like if is_checkpoint else None, bin=bin and has_bin(path), alike=alike)

    a = opened(first)
    b = opened(second, a)
    return (a if a.hf_folder is not None else opened(first, b)), b
