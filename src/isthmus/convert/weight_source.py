"""The protocol of Hugging Face tensor sources, sources made of other ones, and random weights."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from isthmus.families.architecture import Architecture
from isthmus.families.family import SCORE, Family
from isthmus.families.rules.rule import Init, Rule
from isthmus.hf.tensors.safetensors_format import TensorInfo

Index = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    dtype: torch.dtype
    shape: tuple[int, ...]


def copied_dtype(rule: Rule, source: Callable[[], torch.dtype], requested: torch.dtype | None) -> torch.dtype:
    """The dtype of a copy of a tensor whose dtype is that of ``source``; None keeps it.

    Tensors that Megatron-Core has in float32 are not narrowed.
    """
    if requested is None:
        return source()
    return requested if rule.dtype is None else torch.promote_types(source(), requested)


class WeightSource(Protocol):
    """Tensors by Hugging Face name, read slice by slice; ``str`` of it names the source."""

    @property
    def tensors(self) -> Mapping[str, TensorSpec | TensorInfo]: ...

    def read(self, name: str, index: Index | None = None, *, into: Tensor | None = None) -> Tensor:
        """One slice; copied into ``into`` if given."""


class DerivedWeights(ABC):
    """A source with tensors that are made of those of another one, whose other tensors it has unchanged."""

    def __init__(self, source: WeightSource, made: Mapping[str, Mapping[str, TensorSpec | TensorInfo]]) -> None:
        """``made`` has the tensors in place of each one of ``source`` that changes; without any, it is left out."""
        self._source = source
        self._made = {name for tensors in made.values() for name in tensors}
        self.tensors: dict[str, TensorSpec | TensorInfo] = {}
        for name, meta in source.tensors.items():
            self.tensors.update(made.get(name, {name: meta}))

    def __str__(self) -> str:
        return str(self._source)

    def read(self, name: str, index: Index | None = None, *, into: Tensor | None = None) -> Tensor:
        if name in self._made:
            return self._make(name, index, into)
        return self._source.read(name, index, into=into)

    @abstractmethod
    def _make(self, name: str, index: Index | None, into: Tensor | None) -> Tensor:
        """:meth:`WeightSource.read` of a tensor that ``source`` does not have."""


class PartOfWeights(DerivedWeights):
    """The tensors that ``part``, the same model with fewer tokens or layers, has of ``source``."""

    def __init__(self, source: WeightSource, family: Family, arch: Architecture, part: Architecture) -> None:
        shapes, part_shapes = family.hf_shapes(arch), family.hf_shapes(part)
        made: dict[str, dict[str, TensorSpec | TensorInfo]] = {}
        for name, meta in source.tensors.items():
            if name in shapes and name not in part_shapes:  # check_coverage names those that are in neither
                made[name] = {}
            elif name in shapes and tuple(meta.shape) == shapes[name] != part_shapes[name]:
                made[name] = {name: TensorSpec(meta.dtype, part_shapes[name])}
        super().__init__(source, made)

    def _make(self, name: str, index: Index | None, into: Tensor | None) -> Tensor:
        return self._source.read(name, index or tuple(map(slice, self.tensors[name].shape)), into=into)


class WithScoreHead(DerivedWeights):
    """The tensors of a language model, with a random score head in place of its output layer."""

    def __init__(self, source: WeightSource, family: Family, arch: Architecture, seed: int) -> None:
        """``arch`` is the reward model."""
        super().__init__(source, {name: {} for name in family.output_names})
        self._head = RandomWeights(family, arch, seed, next(iter(source.tensors.values())).dtype)
        (head,) = SCORE.parts
        self._made.add(head.name)
        self.tensors[head.name] = self._head.tensors[head.name]

    def _make(self, name: str, index: Index | None, into: Tensor | None) -> Tensor:
        return self._head.read(name, index, into=into)


class RandomWeights:
    """Initial weights: matrices normal with ``init_std``, norm weights one, biases zero.

    A tensor depends only on the seed and its name, so every parallel layout starts from the same model.
    """

    def __init__(self, family: Family, arch: Architecture, seed: int, dtype: torch.dtype = torch.float32) -> None:
        self._seed = seed
        self._std = arch.init_std
        self._gain_of_one = 0.0 if arch.norm.norm_zero_centered else 1.0
        self._init: dict[str, Init] = {}
        for placement in family.placements(arch).values():
            self._init |= dict.fromkeys(placement.hf, placement.rule.init)
        self.tensors: dict[str, TensorSpec] = {
            name: TensorSpec(dtype, shape) for name, shape in family.hf_shapes(arch).items()
        }
        self._last: tuple[str, Tensor] | None = None

    def __str__(self) -> str:
        return f"random weights (seed {self._seed})"

    def read(self, name: str, index: Index | None = None, *, into: Tensor | None = None) -> Tensor:
        """Caches the last tensor, since its slices are read in succession."""
        if self._last is None or self._last[0] != name:
            self._last = (name, self._draw(name))
        part = self._last[1][index or ...]
        return part.clone() if into is None else into.detach().copy_(part)

    def _draw(self, name: str) -> Tensor:
        meta, init = self.tensors[name], self._init[name]
        if isinstance(init, float):
            return torch.full(meta.shape, init, dtype=meta.dtype)
        constants = {"ones": self._gain_of_one, "zeros": 0.0, "plain_ones": 1.0}
        if init in constants:
            return torch.full(meta.shape, constants[init], dtype=meta.dtype)
        digest = hashlib.sha256(f"{self._seed}:{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big"))
        drawn = torch.empty(meta.shape)
        if init == "log_decay":
            drawn.uniform_(0.01, 16, generator=generator).log_()
        elif init == "time_step":
            drawn.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp_()
            drawn += torch.log(-torch.expm1(-drawn))
        else:
            drawn.normal_(0.0, self._std, generator=generator)
        return drawn.to(meta.dtype)
