"""Hugging Face tensors, woven into Megatron-Core's as they are read."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.convert.canonical import own_placements
from isthmus.convert.coverage import check_coverage
from isthmus.convert.weight_source import WeightSource
from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.rules.shard import pieces_of


class WovenWeights:
    """The tensors of a Hugging Face model under canonical names."""

    def __init__(self, source: WeightSource, family: Family, arch: Architecture) -> None:
        """Check that the source holds exactly the tensors of the model.

        Raises:
            DataError, MissingInput: it does not, see :func:`~isthmus.convert.coverage.check_coverage`.
        """
        check_coverage(source, family, arch)
        self.source, self._arch = source, arch
        self._placements = own_placements(family, arch)

    def __str__(self) -> str:
        """For messages."""
        return str(self.source)

    def dtype(self, canonical: str) -> torch.dtype:
        """See :class:`~isthmus.convert.canonical.CanonicalWeights`.

        Raises:
            UsageError: tensors that become one differ in their dtype.
        """
        found = {name: self.source.tensors[name].dtype for name in self._placements[canonical].hf}
        if len(set(found.values())) > 1:
            told = ", ".join(f"{name} is {str(dtype).removeprefix('torch.')}" for name, dtype in found.items())
            raise UsageError(f"{self}: {told}, and they become one tensor. Choose its type: --dtype.")
        return next(iter(found.values()))

    def read(self, canonical: str, rows: slice) -> Tensor:
        """See :class:`~isthmus.convert.canonical.CanonicalWeights`."""
        placed = self._placements[canonical]
        height = rows.stop - rows.start
        metas = [self.source.tensors[name].dtype for name in placed.hf]
        widest = max(metas, key=lambda dtype: dtype.itemsize)
        found = torch.empty((height, *placed.rule.canonical_shape(self._arch)[1:]), dtype=widest)
        for piece in pieces_of(placed.rule, self._arch, (rows,), (slice(0, height),), placed.expert):
            self.source.read(placed.hf[piece.part], piece.hf, into=piece.view(found))
        return found
