"""Stacked experts [E, out, in], as in transformers' memory, of families whose published files have [E, in, out]."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from isthmus.convert.weight_source import TensorSpec, WeightSource
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.hf.tensors.safetensors_format import TensorInfo


class TransposedExperts:
    """A source in which the last two dimensions of some tensors change places."""

    def __init__(self, source: WeightSource, names: Collection[str]) -> None:
        self._source, self._names = source, names
        self.tensors: dict[str, TensorSpec | TensorInfo] = {
            name: TensorSpec(meta.dtype, _swapped(tuple(meta.shape))) if name in names else meta
            for name, meta in source.tensors.items()
        }

    def __str__(self) -> str:
        return str(self._source)

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        if name not in self._names:
            return self._source.read(name, index, into=into)
        first, rows, columns = (*(index or ()), *[slice(None)] * 3)[:3]
        tensor = self._source.read(name, (first, columns, rows)).mT
        return tensor.contiguous() if into is None else into.detach().copy_(tensor)


def transposed_experts(source: WeightSource, family: Family, arch: Architecture) -> TransposedExperts | None:
    """The source with the shapes of the family, where they show that the file has the other order; None elsewhere."""
    if not any(rule.stacked and rule.transposed for rule in family.rules):
        return None
    names = {
        name
        for placed in family.placements(arch).values()
        if placed.rule.stacked and placed.rule.transposed
        for name in placed.hf
    }
    expected = family.hf_shapes(arch) if names else {}
    swapped = {
        name
        for name in names & source.tensors.keys()
        if len(shape := tuple(source.tensors[name].shape)) == 3
        and shape != tuple(expected[name])
        and _swapped(shape) == tuple(expected[name])
    }
    return TransposedExperts(source, swapped) if swapped else None


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], shape[-1], shape[-2])
