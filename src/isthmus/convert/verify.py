"""Whether two models on the disk are the same, tensor by tensor and bit by bit, whatever their formats."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from isthmus.convert.stored import Stored, open_stored
from isthmus.convert.torch_dist import checkpoint_folder
from isthmus.convert.transfer import Progress
from isthmus.errors import CheckFailed

_SHOWN = 4


@dataclass(frozen=True, slots=True)
class Verified:
    """What was compared and found the same."""

    formats: tuple[str, str]
    family: str
    num_tensors: int
    num_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """All fields by name."""
        return asdict(self)


@torch.no_grad()
def verify(
    first: Path, second: Path, *, hf_like: Path | None = None, progress: Progress = lambda done, total: None
) -> Verified:
    """Compare two models; they are the same if their configs mean the same and every tensor has the same bits.

    Args:
        first: a Hugging Face folder or a Megatron checkpoint.
        second: the same.
        hf_like: config of a checkpoint that brings none.
        progress: called with bytes compared and bytes in all.

    Raises:
        CheckFailed: they differ; the message says where.
        MissingInput, DataError, UnsafeInput, UsageError: one of them cannot be read.
    """
    sides = [_open(path, hf_like) for path in (first, second)]
    a, b = sides
    if faults := _configs(a, b):
        raise CheckFailed(f"{first} and {second} are not the same model: {'; '.join(faults)}.")
    names = a.family.hf_shapes(a.arch)
    total = sum(_nbytes(a, name) for name in names)
    done, differing = 0, []
    for name in names:
        one, other = a.weights.read(name), b.weights.read(name)
        if one.dtype != other.dtype:
            differing.append(f"{name} is {_short(one.dtype)} and {_short(other.dtype)}")
        elif not torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)):
            unlike = one != other
            widest = (one.double() - other.double()).abs().max().item()
            differing.append(f"{name} in {int(unlike.sum())} of {one.numel()} elements, by {widest:.3g} at most")
        done += _nbytes(a, name)
        progress(done, total)
    if differing:
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise CheckFailed(
            f"{first} and {second} differ in {len(differing)} of {len(names)} tensors: "
            f"{'; '.join(differing[:_SHOWN])}{more}."
        )
    return Verified((a.format, b.format), a.family.name, len(names), done)


def _open(path: Path, hf_like: Path | None) -> Stored:
    """``--hf-like`` speaks for the side that needs it."""
    return open_stored(path, hf_like if path.exists() and checkpoint_folder(path) is not None else None)


def _configs(a: Stored, b: Stored) -> list[str]:
    if a.family is not b.family:
        return [f"family {a.family.name} and {b.family.name}"]
    # How weights would be drawn anew is no part of a model that has them.
    ours, theirs = (asdict(replace(side.arch, init_std=0.0)) for side in (a, b))
    return [f"{name}={ours[name]} and {theirs[name]}" for name in ours if ours[name] != theirs[name]]


def _nbytes(side: Stored, name: str) -> int:
    meta = side.weights.tensors[name]
    return torch.Size(meta.shape).numel() * meta.dtype.itemsize


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
