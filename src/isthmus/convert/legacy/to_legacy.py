"""Megatron's legacy files, written tensor by tensor: each rank's file is laid out with holes that are then filled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from isthmus.convert.canonical import own_placements, spelling_of
from isthmus.convert.legacy.from_legacy import FILE
from isthmus.convert.legacy.legacy_layout import Cuts, Grid
from isthmus.convert.legacy.torch_pickle import read_archive
from isthmus.convert.torch_dist.to_torch_dist import save_without_data
from isthmus.engine.checkpoint.checkpoint_names import is_linear, transformer_engine_name
from isthmus.errors import disk_errors
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family, Placement
from isthmus.families.rules.shard import Index, overlap
from isthmus.hf.tensors.parallel_writer import TensorWriter
from isthmus.hf.tensors.safetensors_format import TensorInfo

LiveSpelling = Literal["local", "te"]
"""Whose names: of Megatron-Core's own layers, or of TransformerEngine's with fused norms and grouped experts."""


class LegacyFiles:
    """One ``model_optim_rng.pt`` for each rank of the grid."""

    def __init__(
        self,
        folder: Path,
        family: Family,
        arch: Architecture,
        dtypes: Mapping[str, torch.dtype],
        common: Mapping[str, Any],
        grid: Grid,
        spelling: LiveSpelling,
    ) -> None:
        """Lay the files out in an existing folder.

        Args:
            folder: where.
            family: the names.
            arch: the shapes.
            dtypes: of each tensor, by canonical name.
            common: what is no tensor, the same in each file.
            grid: which ranks there are.
            spelling: the names of norms and experts.

        Raises:
            NoSpace, IOFailure: the disk has no room for them, or refuses.
        """
        self._writer = TensorWriter(folder)
        self._parts: dict[str, list[tuple[TensorInfo, list[tuple[Index, Index]]]]] = {
            name: [] for name in own_placements(family, arch)
        }
        kinds, layers, cuts = spelling_of(arch), grid.layers_of(arch), Cuts(grid, arch)
        stages: list[list[tuple[Placement, int, str]]] = [[] for _ in range(grid.pp)]
        for name, placed in family.placements(arch).items():
            for stage, chunk, local in grid.place(name, arch, layers):
                stages[stage].append((placed, chunk, local))
        padded = padded_vocab_size(arch, grid)
        for file in grid.files():
            states: dict[str, dict[str, Any]] = {grid.chunk(number): {} for number in range(grid.vpp)}
            filled: list[tuple[str, str, str, list[tuple[Index, Index]]]] = []
            for placed, chunk, local in stages[file.pp]:
                if (here := grid.on_rank(local, file, arch)) is None:
                    continue
                live = transformer_engine_name(here, kinds) if spelling == "te" else here
                name = _EMBEDDING if placed.rule.alias else placed.canonical
                shape, rectangles = cuts.of(placed.rule, file, padded)
                states[grid.chunk(chunk)][live] = torch.empty(shape, dtype=dtypes[name])
                if is_linear(placed.canonical) and not placed.rule.of_expert:
                    states[grid.chunk(chunk)][f"{live.removesuffix('weight')}_extra_state"] = None
                filled.append((grid.chunk(chunk), live, name, rectangles))
            path = Path(grid.folder(file)) / FILE
            with disk_errors(folder / path):
                (folder / path).parent.mkdir()
                save_without_data({**common, **states}, folder / path)
            opened = read_archive(folder / path)
            for chunk_name, live, name, rectangles in filled:
                info = opened[chunk_name][live]
                self._parts[name].append((TensorInfo(info.dtype, info.shape, path, info.offset), rectangles))
        self.total_bytes = sum(
            sum(_nbytes(info, here) for _, here in rectangles)
            for parts in self._parts.values()
            for info, rectangles in parts
        )

    def put(self, canonical: str, rows: slice, chunk: Tensor) -> int:
        """See :class:`~isthmus.convert.canonical.Destination`."""
        done = 0
        for info, rectangles in self._parts[canonical]:
            for mine, local in rectangles:
                if (shared := overlap(mine, local, rows)) is not None:
                    here, there = shared
                    done += self._writer.write_at(info, there, chunk[here])
        return done

    def close(self, *, sync: bool = True) -> None:
        """See :class:`~isthmus.convert.canonical.Destination`."""
        self._writer.close(sync=sync)


_EMBEDDING = "embedding.word_embeddings.weight"


def padded_vocab_size(arch: Architecture, grid: Grid) -> int:
    """Rows of the embedding over all ranks, each of which has the same number."""
    return math.ceil(arch.vocab_size / grid.tp) * grid.tp


def _nbytes(info: TensorInfo, index: Index) -> int:
    lengths = list(info.shape)
    for axis, cut in enumerate(index):
        if cut.stop is not None:
            lengths[axis] = cut.stop - (cut.start or 0)
    return math.prod(lengths) * info.dtype.itemsize
