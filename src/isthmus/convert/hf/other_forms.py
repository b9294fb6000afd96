"""Files of programs that write other tensor names than the published ones, or cut tensors at other rows."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from isthmus.convert.weight_source import TensorSpec, WeightSource
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.hf.tensors.safetensors_format import TensorInfo, bounds_of


def other_names(source: WeightSource, family: Family, config: Mapping[str, Any]) -> dict[str, str]:
    """The names of the family for tensors that it does not have, see :attr:`Family.other_names`; the rest is absent."""
    if not family.other_names:
        return {}
    expected = family.hf_shapes(family.to_architecture(config, source.tensors or None))
    names: dict[str, str] = {}
    for name in source.tensors:
        candidates = (name.replace(*pair) for pair in family.other_names.items() if name not in expected)
        new = next((new for new in candidates if new in expected and new not in source.tensors), None)
        if new is not None and new not in names.values():
            names[name] = new
    return names


class RecutRows:
    """Tensors of ``source``, some of which are cut at other rows of their concatenation."""

    def __init__(self, source: WeightSource, groups: list[dict[str, int]]) -> None:
        """``groups`` have the rows of tensors whose concatenation in ``source`` is theirs."""
        self._source = source
        self.tensors: dict[str, TensorSpec | TensorInfo] = {**source.tensors}
        self._places: dict[str, tuple[int, tuple[str, ...]]] = {}
        for group in groups:
            for (name, rows), start in zip(group.items(), accumulate(group.values(), initial=0), strict=False):
                meta = source.tensors[name]
                self.tensors[name] = TensorSpec(meta.dtype, (rows, *meta.shape[1:]))
                self._places[name] = (start, tuple(group))

    def __str__(self) -> str:
        return str(self._source)

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        if name not in self._places:
            return self._source.read(name, index, into=into)
        before, group = self._places[name]
        (low, high), *others = bounds_of(self.tensors[name].shape, index)
        columns = tuple(slice(*bounds) for bounds in others)
        edges = accumulate((self._source.tensors[part].shape[0] for part in group), initial=0)
        pieces = []
        for part, (start, end) in zip(group, pairwise(edges), strict=True):
            first, last = max(before + low, start), min(before + high, end)
            if first < last:
                pieces.append(self._source.read(part, (slice(first - start, last - start), *columns)))
        tensor = torch.cat(pieces)
        return tensor if into is None else into.detach().copy_(tensor)


def recut_rows(source: WeightSource, family: Family, arch: Architecture) -> RecutRows | None:
    """The source with the tensors of the family, if a file has them cut at other rows; None if it has not.

    transformers saves convolutions of queries, keys and values that it has in one tensor as thirds of its rows, and
    concatenates them when it loads them.
    """
    groups = []
    if not any(rule.recut for rule in family.rules):
        return None
    for placed in family.placements(arch).values():
        if not placed.rule.recut or not all(name in source.tensors for name in placed.hf):
            continue
        rows = dict(zip(placed.hf, (shape[0] for shape in placed.rule.part_shapes(arch)), strict=False))
        theirs = [tuple(source.tensors[name].shape) for name in rows]
        same_columns = len({shape[1:] for shape in theirs}) == 1 and all(theirs)
        if same_columns and [shape[0] for shape in theirs] != [*rows.values()]:
            if sum(shape[0] for shape in theirs) == sum(rows.values()):
                groups.append(rows)
    return RecutRows(source, groups) if groups else None
