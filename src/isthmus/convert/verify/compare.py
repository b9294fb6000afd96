"""Whether two models on the disk are the same, tensor by tensor and bit by bit, whatever their formats."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from isthmus.convert.canonical import own_placements
from isthmus.convert.hf.pytorch_bin import has_bin
from isthmus.convert.open_model import Stored, open_stored
from isthmus.convert.stream import Progress, stream
from isthmus.convert.torch_dist.from_torch_dist import checkpoint_folder
from isthmus.convert.verify.checksums import Digests, read_manifest
from isthmus.convert.verify.compare_logits import LogitsCheck, LogitsCompared, compare_logits
from isthmus.convert.weight_source import Meta
from isthmus.errors import CheckFailed, DataError, MissingInput, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Placement
from isthmus.families.rules.rule import Shape
from isthmus.families.rules.shard import pieces_of
from isthmus.hf.tensors.safetensors_format import byte_view

_SHOWN = 4
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Whole numbers by their bytes."""


@dataclass(frozen=True, slots=True)
class Verified:
    """What was compared and found the same."""

    formats: tuple[str, str]
    family: str
    num_tensors: int
    num_bytes: int
    checksums: tuple[bool, ...]
    """Whether each side brought checksums of its own; they were checked then."""
    logits: LogitsCompared | None = None
    """What both sides said of the same tokens, if that was asked for."""

    def as_dict(self) -> dict[str, Any]:
        """All fields by name, those of the logits beside the others."""
        fields = asdict(self)
        logits = fields.pop("logits") or {}
        return fields | {
            "logits_max_abs": logits.get("max_abs"),
            "logits_mean_kl_nats": logits.get("mean_kl_nats"),
            "logits_run": logits.get("how"),
        }


@torch.no_grad()
def verify(
    first: Path,
    second: Path,
    *,
    hf_like: Path | None = None,
    bin: bool = False,
    logits: LogitsCheck | None = None,
    progress: Progress = lambda done, total: None,
) -> Verified:
    """Compare two models; they are the same if their configs mean the same and every tensor has the same bits.

    Args:
        first: a Hugging Face folder or a Megatron checkpoint.
        second: the same.
        hf_like: config of a checkpoint that brings none.
        bin: of a Hugging Face folder that has ``pytorch_model*.bin``, read these instead of safetensors.
        logits: run both models as well, even if they differ, and compare what they say.
        progress: called with bytes compared and bytes in all.

    Raises:
        CheckFailed: they differ; the message says where.
        DataError: one of them is not what its checksums say.
        MissingInput, DataError, UnsafeInput, UsageError: one of them cannot be read, or run.
    """
    if bin and not has_bin(first) and not has_bin(second):
        raise MissingInput(f"neither {first} nor {second} holds pytorch_model*.bin. Leave --bin out.")
    a, b = _open_both(first, second, hf_like, bin)
    faults = [f"they are not the same model: {'; '.join(unlike)}"] if (unlike := _configs(a, b)) else []
    verified = None
    if not unlike or (logits is not None and _shapes(a) == _shapes(b)):
        verified, differing = _tensors(a, b, progress)
        faults += [differing] if differing else []
    compared = None
    if logits is not None:
        try:
            compared = compare_logits(a, b, logits, progress)
        except UsageError as error:
            if not faults:
                raise
            faults.append(f"their logits were not compared: {str(error).rstrip('.')}")
    if faults or (compared is not None and not compared.same):
        told = [*faults, *([str(compared)] if compared is not None else [])]
        raise CheckFailed(f"{first} and {second}: {'; '.join(told)}.")
    assert verified is not None
    return replace(verified, logits=compared)


def _tensors(a: Stored, b: Stored, progress: Progress) -> tuple[Verified, str]:
    """Compare the tensors of two models that have the same ones; in words how they differ, if they do."""
    sides = (a, b)
    placements = own_placements(a.family, a.arch)
    metas = {
        name: Meta(a.weights.dtype(name), placed.rule.canonical_shape(a.arch)) for name, placed in placements.items()
    }
    wanted, found = [read_manifest(side.path) for side in sides], [Digests() for _ in sides]
    differing = _Differing()

    def compare(name: str, rows: slice) -> int:
        chunks = [side.weights.read(name, rows) for side in sides]
        for chunk, sums, digests in zip(chunks, wanted, found, strict=True):
            if sums:
                digests.update(name, chunk)
        differing.take(placements[name], a.arch, rows, *chunks)
        return chunks[0].nbytes

    total = sum(torch.Size(meta.shape).numel() * meta.dtype.itemsize for meta in metas.values())
    stream(metas, compare, total, progress)
    for side, sums, digests in zip(sides, wanted, found, strict=True):
        _check_sums(side, sums, digests.found())
    shapes = a.family.hf_shapes(a.arch)
    same = Verified((a.format, b.format), a.family.name, len(shapes), total, tuple(bool(sums) for sums in wanted))
    if not (faults := differing.told(shapes)):
        return same, ""
    more = f" and {len(faults) - _SHOWN} more" if len(faults) > _SHOWN else ""
    return same, f"they differ in {len(faults)} of {len(shapes)} tensors: {'; '.join(faults[:_SHOWN])}{more}"


def _shapes(side: Stored) -> dict[str, Shape]:
    placements = own_placements(side.family, side.arch)
    return {name: placed.rule.canonical_shape(side.arch) for name, placed in placements.items()}


class _Differing:
    """Which Hugging Face tensors are not the same, in how many elements and by how much."""

    def __init__(self) -> None:
        self._types: dict[str, str] = {}
        self._elements: dict[str, tuple[int, float]] = {}
        self._lock = threading.Lock()

    def take(self, placed: Placement, arch: Architecture, rows: slice, one: Tensor, other: Tensor) -> None:
        """Compare some rows of a tensor, bit by bit."""
        if one.dtype != other.dtype:
            self._types |= dict.fromkeys(placed.hf, f"is {_short(one.dtype)} and {_short(other.dtype)}")
            return
        # By numpy, which does it eight times as fast as torch.equal.
        if np.array_equal(byte_view(one), byte_view(other)):
            return
        here = (slice(0, rows.stop - rows.start),)
        with self._lock:  # experts may lie in one tensor
            for piece in pieces_of(placed.rule, arch, (rows,), here, placed.expert):
                ours, theirs = (piece.view(chunk).contiguous() for chunk in (one, other))
                if unlike := int((ours.view(_BITS[ours.itemsize]) != theirs.view(_BITS[ours.itemsize])).sum()):
                    count, widest = self._elements.get(placed.hf[piece.part], (0, 0.0))
                    gap = (ours.double() - theirs.double()).abs().max().item()
                    self._elements[placed.hf[piece.part]] = (count + unlike, max(widest, gap))

    def told(self, shapes: Mapping[str, Shape]) -> list[str]:
        """One entry for each tensor."""
        told = [f"{name} {kinds}" for name, kinds in self._types.items()]
        return told + [
            f"{name} in {count} of {math.prod(shapes[name])} elements, by {widest:.3g} at most"
            for name, (count, widest) in self._elements.items()
        ]


def _check_sums(side: Stored, wanted: Mapping[str, str], found: Mapping[str, str]) -> None:
    faults = [
        f"{name} with {wanted.get(name)} and has {found.get(name)}"
        for name in {**wanted, **found}
        if wanted.get(name) != found.get(name)
    ]
    if faults:
        more = f" (and {len(faults) - _SHOWN} more tensors)" if len(faults) > _SHOWN else ""
        raise DataError(
            f"{side.path} is not as it was written: its checksums.json has {'; '.join(faults[:_SHOWN])}{more}. "
            "Convert or fetch it again."
        )


def _open_both(first: Path, second: Path, hf_like: Path | None, bin: bool) -> tuple[Stored, Stored]:
    """Both sides; what the arguments of one leave open, since it has no config, is what the other has."""
    one = _open(first, hf_like, bin)
    other = _open(second, hf_like, bin, one)
    return (one if one.like is not None else _open(first, hf_like, bin, other)), other


def _open(path: Path, hf_like: Path | None, bin: bool, alike: Stored | None = None) -> Stored:
    """``--hf-like`` and ``--bin`` speak for the side that needs them."""
    megatron = path.exists() and checkpoint_folder(path) is not None
    return open_stored(path, hf_like if megatron else None, bin=bin and has_bin(path), alike=alike)


def _configs(a: Stored, b: Stored) -> list[str]:
    if a.family is not b.family:
        return [f"family {a.family.name} and {b.family.name}"]
    # How weights would be drawn anew is no part of a model that has them.
    ours, theirs = (asdict(replace(side.arch, init_std=0.0)) for side in (a, b))
    return list(_unlike(ours, theirs))


def _unlike(ours: Mapping[str, Any], theirs: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Fields that differ, down to those of a field both have, such as ``rope_scaling.factor``."""
    for name, one in ours.items():
        other = theirs[name]
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from _unlike(one, other, f"{within}{name}.")
        elif one != other:
            yield f"{within}{name}={_said(one)} and {_said(other)}"


def _said(value: Any) -> Any:
    return (
        {name: said for name, said in value.items() if said not in (None, ())} if isinstance(value, Mapping) else value
    )


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
