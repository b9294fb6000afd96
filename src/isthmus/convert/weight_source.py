"""What weights can be read from: a model folder, or nothing but a seed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.rules.rule import Init


class TensorMeta(Protocol):
    """Dtype and shape of a tensor that has not been read."""

    @property
    def dtype(self) -> torch.dtype:
        """Element type."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions."""


class WeightSource(Protocol):
    """Named tensors of a Hugging Face model, read slice by slice; ``str`` of it says where they come from."""

    @property
    def tensors(self) -> Mapping[str, TensorMeta]:
        """All tensors by Hugging Face name."""

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        """One slice; ``into``, if given, is filled and returned."""


@dataclass(frozen=True, slots=True)
class Meta:
    """Dtype and shape of a tensor that is made up or put together."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class RandomWeights:
    """Weights of a model that starts from nothing, in the shape of a Hugging Face model.

    Matrices are normal with the architecture's ``init_std``, gains of norms one, biases zero. Each tensor's numbers
    follow from the seed and its name alone, so that every layout of ranks starts from the same model.
    """

    def __init__(self, family: Family, arch: Architecture, seed: int, dtype: torch.dtype = torch.float32) -> None:
        """Nothing is drawn yet."""
        self._seed = seed
        self._std = arch.init_std
        self._gain_of_one = 0.0 if arch.norm_zero_centered else 1.0
        self._init: dict[str, Init] = {}
        for placement in family.placements(arch).values():
            self._init |= dict.fromkeys(placement.hf, placement.rule.init)
        self.tensors = {name: Meta(dtype, shape) for name, shape in family.hf_shapes(arch).items()}
        self._last: tuple[str, Tensor] | None = None

    def __str__(self) -> str:
        """For messages."""
        return f"random weights (seed {self._seed})"

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        """Draw the tensor and return the slice; the tensor drawn last is kept, as its slices are read in a row."""
        if self._last is None or self._last[0] != name:
            self._last = (name, self._draw(name))
        part = self._last[1][index or ...]
        return part.clone() if into is None else into.detach().copy_(part)

    def _draw(self, name: str) -> Tensor:
        meta = self.tensors[name]
        whole = torch.empty(meta.shape, dtype=torch.float32)
        match self._init[name]:
            case "ones":
                whole.fill_(self._gain_of_one)
            case "zeros":
                whole.zero_()
            case "normal":
                digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
                whole.normal_(
                    0.0, self._std, generator=torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
                )
        return whole.to(meta.dtype)
