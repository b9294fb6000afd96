"""Files of programs that write other names than the published ones, experts in one tensor, or other rows."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from isthmus.convert.weight_source import DerivedWeights, Index, TensorSpec, WeightSource
from isthmus.errors import DataError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.hf.tensors.safetensors_format import bounds_of

_FUSED = re.compile(r"(?P<owner>.*\.experts)\.(?P<leaf>gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


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


class SplitExperts(DerivedWeights):
    """``X.experts.gate_up_proj`` [E, 2F, H] and ``X.experts.down_proj`` [E, H, F] as the matrices of each expert.

    transformers has experts so in memory, under one name for each layer.
    """

    def __init__(self, source: WeightSource, fused: Mapping[str, re.Match[str]]) -> None:
        """``fused`` are the tensors to split, with their parsed names."""
        self._parts: dict[str, tuple[str, int, int]] = {}
        made: dict[str, dict[str, TensorSpec]] = {}
        for name, match in fused.items():
            leaves, meta = _PARTS[match["leaf"]], source.tensors[name]
            experts, rows, columns = meta.shape
            height, made[name] = rows // len(leaves), {}
            for expert in range(experts):
                for number, leaf in enumerate(leaves):
                    part_name = f"{match['owner']}.{expert}.{leaf}.weight"
                    if part_name in source.tensors:
                        raise DataError(f"{source} has both {name} and {part_name}. Keep the tensors of one form.")
                    made[name][part_name] = TensorSpec(meta.dtype, (height, columns))
                    self._parts[part_name] = (name, expert, number * height)
        super().__init__(source, made)

    def _make(self, name: str, index: Index | None, into: Tensor | None) -> Tensor:
        fused, expert, first = self._parts[name]
        rows, *columns = (slice(*bounds) for bounds in bounds_of(self.tensors[name].shape, index))
        inner = (slice(expert, expert + 1), slice(first + rows.start, first + rows.stop), *columns)
        return self._source.read(fused, inner, into=None if into is None else into[None])[0]


def split_experts(source: WeightSource, family: Family) -> SplitExperts | None:
    """The source with the names of the family, if its files have one tensor for each expert; None without such."""
    owners = {
        part.name.partition(".{expert}.")[0].replace("{layer}", "")
        for rule in family.rules
        if rule.is_expert and not rule.stacked
        for part in rule.parts
        if part.name.endswith((".gate_proj.weight", ".up_proj.weight", ".down_proj.weight"))
    }
    fused = {
        name: match
        for name, meta in source.tensors.items()
        if (match := _FUSED.fullmatch(name))
        and re.sub(r"\d+", "", match["owner"]) in owners
        and len(meta.shape) == 3
        and meta.shape[1] % len(_PARTS[match["leaf"]]) == 0
    }
    return SplitExperts(source, fused) if fused else None


class RecutRows(DerivedWeights):
    """Tensors of ``source``, some of which are cut at other rows of their concatenation."""

    def __init__(self, source: WeightSource, groups: list[dict[str, int]]) -> None:
        """``groups`` have the rows of tensors whose concatenation in ``source`` is theirs."""
        self._places: dict[str, tuple[int, tuple[str, ...]]] = {}
        made: dict[str, dict[str, TensorSpec]] = {}
        for group in groups:
            for (name, rows), start in zip(group.items(), accumulate(group.values(), initial=0), strict=False):
                meta = source.tensors[name]
                made[name] = {name: TensorSpec(meta.dtype, (rows, *meta.shape[1:]))}
                self._places[name] = (start, tuple(group))
        super().__init__(source, made)

    def _make(self, name: str, index: Index | None, into: Tensor | None) -> Tensor:
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


class TransposedExperts(DerivedWeights):
    """A source in which the last two dimensions of some tensors change places."""

    def __init__(self, source: WeightSource, names: Collection[str]) -> None:
        metas = {name: source.tensors[name] for name in names}
        super().__init__(
            source, {name: {name: TensorSpec(meta.dtype, _swapped(meta.shape))} for name, meta in metas.items()}
        )

    def _make(self, name: str, index: Index | None, into: Tensor | None) -> Tensor:
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
