"""Sources of Hugging Face tensors: the protocol of all of them, and random weights."""

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
    """Named tensors of a Hugging Face model, read slice by slice; ``str`` of it names the source."""

    @property
    def tensors(self) -> Mapping[str, TensorMeta]:
        """All tensors by Hugging Face name."""

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        """One slice; ``into``, if given, is filled and returned."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype and shape of a tensor that is computed when it is read."""

    dtype: torch.dtype
    shape: tuple[int, ...]


class RandomWeights:
    """Initial weights of a model that is trained from scratch.

    Matrices are normal with the architecture's ``init_std``, gains of norms are one, biases are zero. The values of a
    tensor depend on the seed and its name alone, so that every layout of ranks starts from the same model.
    """

    def __init__(self, family: Family, arch: Architecture, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self._seed = seed
        self._std = arch.init_std
        self._gain_of_one = 0.0 if arch.norm_zero_centered else 1.0
        self._init: dict[str, Init] = {}
        for placement in family.placements(arch).values():
            self._init |= dict.fromkeys(placement.hf, placement.rule.init)
        self.tensors = {name: TensorSpec(dtype, shape) for name, shape in family.hf_shapes(arch).items()}
        self._last: tuple[str, Tensor] | None = None

    def __str__(self) -> str:
        return f"random weights (seed {self._seed})"

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        """One slice; the tensor drawn last is cached, since its slices are read one after the other."""
        if self._last is None or self._last[0] != name:
            self._last = (name, self._draw(name))
        part = self._last[1][index or ...]
        return part.clone() if into is None else into.detach().copy_(part)

    def _draw(self, name: str) -> Tensor:
        meta = self.tensors[name]
        tensor = torch.empty(meta.shape, dtype=torch.float32)
        match self._init[name]:
            case "ones":
                tensor.fill_(self._gain_of_one)
            case "zeros":
                tensor.zero_()
            case "normal":
                digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
                generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
                tensor.normal_(0.0, self._std, generator=generator)
        return tensor.to(meta.dtype)
