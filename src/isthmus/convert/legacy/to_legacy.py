"""Writes Megatron's legacy checkpoints: creates each rank's file with holes and fills them tensor by tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from isthmus.convert.canonical import Destination, unique_placements
from isthmus.convert.legacy.from_legacy import FILE
from isthmus.convert.legacy.legacy_layout import LegacyLayout, RankFile, local_slices
from isthmus.convert.torch_pickle import read_torch_pickle, save_without_data
from isthmus.engine.tensor_names import is_linear, spelling_of, transformer_engine_name
from isthmus.errors import disk_errors
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family, Placement
from isthmus.families.rules.shard import Index, intersect_rows
from isthmus.hf.tensors.parallel_writer import TensorWriter
from isthmus.hf.tensors.safetensors_format import TensorInfo, bounds_of

LiveSpelling = Literal["local", "te"]
"""Tensor names of Megatron-Core's local layers, or of TransformerEngine with fused norms and grouped experts."""
_EMBEDDING = "embedding.word_embeddings.weight"


class LegacyWriter(Destination):
    def __init__(
        self,
        folder: Path,
        family: Family,
        arch: Architecture,
        dtypes: Mapping[str, torch.dtype],
        common: Mapping[str, Any],
        layout: LegacyLayout,
        spelling: LiveSpelling,
    ) -> None:
        """``common`` is the content of each file that is not a tensor."""
        self.writer: TensorWriter = TensorWriter(folder)
        self._arch, self._dtypes, self._common = arch, dtypes, common
        self._layout, self._spelling = layout, spelling
        self._parts: dict[str, list[tuple[TensorInfo, list[tuple[Index, Index]]]]] = {
            name: [] for name in unique_placements(family, arch)
        }
        layers = layout.layers_of(arch)
        stages: list[list[tuple[Placement, int, str]]] = [[] for _ in range(layout.pp)]
        for name, placed in family.placements(arch).items():
            for stage, chunk, local in layout.place(name, arch, layers):
                stages[stage].append((placed, chunk, local))
        for file in layout.files():
            self._create_file(folder, file, stages[file.pp])
        self.total_bytes: int = sum(
            math.prod(stop - start for start, stop in bounds_of(info.shape, local)) * info.dtype.itemsize
            for parts in self._parts.values()
            for info, slices in parts
            for _, local in slices
        )

    def put(self, canonical: str, rows: slice, chunk: Tensor) -> int:
        done = 0
        for info, slices in self._parts[canonical]:
            for canonical_index, local in slices:
                if (shared := intersect_rows(canonical_index, local, rows)) is not None:
                    done += self.writer.write_at(info, shared[1], chunk[shared[0]])
        return done

    def _create_file(self, folder: Path, file: RankFile, tensors: list[tuple[Placement, int, str]]) -> None:
        """Save a rank's file with holes for its tensors, and record their offsets."""
        layout, spelling = self._layout, spelling_of(self._arch)
        padded = padded_vocab_size(self._arch, layout)
        states: dict[str, dict[str, Any]] = {layout.chunk_key(number): {} for number in range(layout.vpp)}
        added: list[tuple[str, str, str, list[tuple[Index, Index]]]] = []
        for placed, number, local in tensors:
            if (on_rank := layout.on_rank(local, file, self._arch)) is None:
                continue
            chunk = layout.chunk_key(number)
            live = transformer_engine_name(on_rank, spelling) if self._spelling == "te" else on_rank
            name = _EMBEDDING if placed.rule.alias else placed.canonical
            shape, slices = local_slices(placed.rule, self._arch, layout, file, padded)
            states[chunk][live] = torch.empty(shape, dtype=self._dtypes[name])
            if is_linear(placed.canonical) and not placed.rule.is_expert:
                states[chunk][f"{live.removesuffix('weight')}_extra_state"] = None
            added.append((chunk, live, name, slices))
        path = Path(layout.folder(file)) / FILE
        with disk_errors(folder / path):
            (folder / path).parent.mkdir()
            save_without_data({**self._common, **states}, folder / path)
        opened = read_torch_pickle(folder / path)
        for chunk, live, name, slices in added:
            info = opened[chunk][live]
            self._parts[name].append((TensorInfo(info.dtype, info.shape, path, info.offset), slices))


def padded_vocab_size(arch: Architecture, layout: LegacyLayout) -> int:
    """Rows of the embedding over all ranks."""
    return math.ceil(arch.vocab_size / layout.tp) * layout.tp
