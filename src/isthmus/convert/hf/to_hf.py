"""Writes canonical tensors into a Hugging Face folder, a few rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from isthmus.convert.canonical import Destination, unique_placements
from isthmus.convert.online import export_plan
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.rules.shard import hf_slices
from isthmus.hf.tensors.parallel_writer import SafetensorsWriter


class HfWriter(Destination):
    """Safetensors files of at most 5 GB, and their index."""

    def __init__(self, folder: Path, family: Family, arch: Architecture, dtypes: Mapping[str, torch.dtype]) -> None:
        """``dtypes`` are by canonical name."""
        self._arch, self._placements = arch, unique_placements(family, arch)
        by_name = {name: dtypes[placed.canonical] for placed in self._placements.values() for name in placed.hf}
        plan = export_plan(family, arch, by_name)
        plan.create(folder)
        self._writer: SafetensorsWriter = SafetensorsWriter(plan, folder)
        self.total_bytes = plan.total_bytes

    def put(self, canonical: str, rows: slice, chunk: Tensor) -> int:
        placed = self._placements[canonical]
        here = (slice(0, rows.stop - rows.start),)
        return sum(
            self._writer.write(placed.hf[piece.part], piece.hf, piece.view(chunk))
            for piece in hf_slices(placed.rule, self._arch, (rows,), here, placed.expert)
        )
