"""Reads and writes Hugging Face tensors under canonical names, a few rows at a time."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from isthmus.convert.canonical import CanonicalWeights, Destination, unique_placements
from isthmus.convert.coverage import check_coverage
from isthmus.convert.online import export_plan
from isthmus.convert.weight_source import TensorSpec, WeightSource
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.rules.shard import hf_slices
from isthmus.hf.tensors.parallel_writer import SafetensorsWriter
from isthmus.hf.tensors.safetensors_format import TensorInfo


class HfWeights(CanonicalWeights):
    source: WeightSource

    def __init__(self, source: WeightSource, family: Family, arch: Architecture) -> None:
        check_coverage(source, family, arch)
        self.source, self._arch = source, arch
        self._placements = unique_placements(family, arch)

    def dtype(self, canonical: str) -> torch.dtype:
        """A UsageError if the Hugging Face tensors that form it differ in dtype."""
        dtypes = {name: self.source.tensors[name].dtype for name in self._placements[canonical].hf}
        if len(set(dtypes.values())) > 1:
            text = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for name, dtype in dtypes.items())
            raise UsageError(f"{self}: {text}, and they become one tensor. Convert the model with --dtype.")
        return next(iter(dtypes.values()))

    def read(self, canonical: str, rows: slice) -> Tensor:
        """In a dtype that has all values of its parts."""
        placed = self._placements[canonical]
        height = rows.stop - rows.start
        dtype = functools.reduce(torch.promote_types, (self.source.tensors[name].dtype for name in placed.hf))
        tensor = torch.empty((height, *placed.rule.canonical_shape(self._arch)[1:]), dtype=dtype)
        for piece in hf_slices(placed.rule, self._arch, (rows,), (slice(0, height),), placed.expert):
            self.source.read(placed.hf[piece.part], piece.hf, into=piece.view(tensor))
        return tensor


class HfWriter(Destination):
    """Safetensors files of at most 5 GB, and their index."""

    writer: SafetensorsWriter

    def __init__(
        self,
        folder: Path,
        family: Family,
        arch: Architecture,
        dtypes: Mapping[str, torch.dtype],
        towers: Mapping[str, TensorSpec | TensorInfo] | None = None,
    ) -> None:
        """``dtypes`` are by canonical name; the files have space for ``towers``, which ``put`` does not write."""
        self._arch, self._placements = arch, unique_placements(family, arch)
        by_name = {name: dtypes[placed.canonical] for placed in self._placements.values() for name in placed.hf}
        plan = export_plan(family, arch, by_name, towers=towers)
        plan.create(folder)
        self.writer = SafetensorsWriter(plan, folder)
        self.total_bytes: int = plan.total_bytes - sum(plan.tensors[name].nbytes for name in towers or ())

    def put(self, canonical: str, rows: slice, chunk: Tensor) -> int:
        placed, local = self._placements[canonical], (slice(0, rows.stop - rows.start),)
        return sum(
            self.writer.write(placed.hf[piece.part], piece.hf, piece.view(chunk))
            for piece in hf_slices(placed.rule, self._arch, (rows,), local, placed.expert)
        )
