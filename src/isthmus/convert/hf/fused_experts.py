"""Experts that a file has in one tensor for each layer, as in the memory of transformers, under the names of each."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from isthmus.convert.weight_source import TensorSpec, WeightSource
from isthmus.errors import DataError
from isthmus.families.family import Family
from isthmus.hf.tensors.safetensors_format import TensorInfo, bounds_of

_FUSED = re.compile(r"(?P<owner>.*\.experts)\.(?P<leaf>gate_up_proj|down_proj)")
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


class SplitExperts:
    """``X.experts.gate_up_proj`` [E, 2F, H] and ``X.experts.down_proj`` [E, H, F] as the matrices of each expert."""

    def __init__(self, source: WeightSource, fused: Mapping[str, re.Match[str]]) -> None:
        """``fused`` are the tensors to split, with their parsed names."""
        self._source = source
        self._parts: dict[str, tuple[str, int, int]] = {}
        self.tensors: dict[str, TensorSpec | TensorInfo] = {}
        for name, meta in source.tensors.items():
            if name not in fused:
                self.tensors[name] = meta
                continue
            leaves = _PARTS[fused[name]["leaf"]]
            experts, rows, columns = meta.shape
            height = rows // len(leaves)
            for expert in range(experts):
                for number, leaf in enumerate(leaves):
                    part_name = f"{fused[name]['owner']}.{expert}.{leaf}.weight"
                    if part_name in source.tensors:
                        raise DataError(f"{source} has both {name} and {part_name}. Keep the tensors of one form.")
                    self.tensors[part_name] = TensorSpec(meta.dtype, (height, columns))
                    self._parts[part_name] = (name, expert, number * height)

    def __str__(self) -> str:
        return str(self._source)

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        if name not in self._parts:
            return self._source.read(name, index, into=into)
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
