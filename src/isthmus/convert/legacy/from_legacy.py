"""Reads Megatron's legacy checkpoints, one ``model_optim_rng.pt`` per rank, a few rows at a time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.convert.canonical import CanonicalWeights
from isthmus.convert.coverage import first_few, reject_mismatch
from isthmus.convert.legacy.legacy_layout import DataParallelExpertLayout, LegacyLayout, RankFile, local_slices
from isthmus.convert.legacy.pre_core_args import current_args, shards_experts_over_dp
from isthmus.convert.legacy.rank_tensors import (
    Piece,
    RankTensor,
    flat_tensors,
    in_current_order,
    is_pre_core,
    rank_tensors,
)
from isthmus.convert.torch_pickle import args_in, read_torch_pickle
from isthmus.engine.tensor_names import live_names
from isthmus.errors import DataError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family, Placement
from isthmus.families.rules.shard import Index, intersect_rows
from isthmus.files.folder_links import check_links
from isthmus.hf.tensors.safetensors_format import TensorReader

FILE = "model_optim_rng.pt"
_FILES = (FILE, "model_rng.pt")  # the second with a distributed optimizer of early 2023
_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class LegacyFolder:
    """The tensors of all ranks by name."""

    def __init__(self, path: Path) -> None:
        """Derive the layout from the args, and check that the files of all ranks exist."""
        self.path = path
        check_links(path)
        files = {folder.name: _model_file(folder) for folder in sorted(path.glob("mp_rank_*"))}
        opened = {name: _open(file) for name, file in files.items() if file is not None}
        some = next(iter(opened.values()))
        chunks = [state for key, state in some.items() if str(key).startswith("model")]
        self.pre_core_names: frozenset[str] = frozenset(
            name for state in chunks if is_pre_core(state) for name, _ in flat_tensors(state)
        )
        """Names in the first file; empty if Megatron-Core wrote it."""
        self.version: float = float(some.get("checkpoint_version", 0)) if self.pre_core_names else 3.0
        self.args: dict[str, Any] | None = args_in(some)
        if self.args is None and not (self.pre_core_names and len(opened) == 1):
            raise DataError(f"{path} has no args, so its parallel sizes are unknown. Fetch the whole checkpoint.")
        self.layout: LegacyLayout = self._read_layout(len(chunks))
        expected_files = {self.layout.folder(file): file for file in self.layout.files()}
        if missing := [name for name in expected_files if name not in opened]:
            raise DataError(f"{path}: {first_few(missing)} of {len(expected_files)} ranks missing. Fetch them.")
        if more := [name for name in opened if name not in expected_files]:
            raise DataError(f"{path}: {first_few(more)} are not part of {self.layout}. Remove them.")
        self.ranks: dict[RankFile, list[dict[str, RankTensor]]] = {
            file: [
                rank_tensors(opened[name].get(self.layout.chunk_key(number)), self.layout.ep)
                for number in range(self.layout.vpp)
            ]
            for name, file in expected_files.items()
        }

    def _read_layout(self, vpp: int) -> LegacyLayout:
        args, kind = self.args or {}, LegacyLayout
        if self.pre_core_names:
            kind = DataParallelExpertLayout if shards_experts_over_dp(args) else LegacyLayout
            args = current_args(args)
        sizes = {size: int(args[name]) for size, name in _SIZES.items() if args.get(name) is not None}
        if not args.get("num_experts", True):
            sizes.pop("etp", None)  # tools/checkpoint/convert.py keeps the one of its source
        return kind(**sizes, vpp=vpp)

    def __str__(self) -> str:
        return str(self.path)

    def layers(self) -> list[list[int]]:
        """Number of layers in the files of each chunk of each stage."""
        num_layers = [[0] * self.layout.vpp for _ in range(self.layout.pp)]
        for file, chunks in self.ranks.items():
            for number, names in enumerate(chunks):
                counts = [int(layer[1]) + 1 for name in names if (layer := _LAYER.match(name))]
                num_layers[file.pp][number] = max([num_layers[file.pp][number], *counts])
        return num_layers


class LegacyWeights(CanonicalWeights):
    def __init__(self, folder: LegacyFolder, family: Family, arch: Architecture) -> None:
        self.source: LegacyFolder = folder
        self._arch, self._layout = arch, folder.layout
        self._layout.check_sizes(arch)
        self._placements: dict[str, Placement] = {}
        self._parts: dict[str, list[tuple[Piece, list[tuple[Index, Index]]]]] = {}
        self._reader = TensorReader()
        layers = folder.layers()
        if (total := sum(map(sum, layers))) != arch.num_layers:
            reject_mismatch(folder, family, [], [], [f"it has {total} layers, not {arch.num_layers}"])
        missing: list[str] = []
        misshapen: list[str] = []
        used: set[tuple[RankFile, int, str]] = set()
        for name, placed in family.placements(arch).items():
            self._parts[name] = []
            for stage, chunk, local in self._layout.place(name, arch, layers):
                for file in (file for file in folder.ranks if file.pp == stage):
                    if (on_rank := self._layout.on_rank(local, file, arch)) is None:
                        continue
                    tensors = folder.ranks[file][chunk]
                    live = next((live for live in live_names(on_rank) if live in tensors), None)
                    if live is None:
                        missing.append(f"{name} (in {self._layout.folder(file)})")
                        continue
                    used.add((file, chunk, live))
                    misshapen += self._add_part(placed, file, tensors[live])
            if not placed.rule.alias:
                self._placements[name] = placed
        unexpected = [
            f"{name} (in {self._layout.folder(file)})"
            for file, chunks in folder.ranks.items()
            for number, tensors in enumerate(chunks)
            for name in tensors
            if (file, number, name) not in used
        ]
        reject_mismatch(folder, family, missing, unexpected, misshapen)

    def dtype(self, canonical: str) -> torch.dtype:
        return self._parts[canonical][0][0].info.dtype

    def read(self, canonical: str, rows: slice) -> Tensor:
        shape = self._placements[canonical].rule.canonical_shape(self._arch)
        tensor = torch.empty((rows.stop - rows.start, *shape[1:]), dtype=self.dtype(canonical))
        seen: set[tuple[tuple[int | None, int | None], ...]] = set()
        for piece, slices in self._parts[canonical]:
            for canonical_index, local in slices:
                where = tuple((cut.start, cut.stop) for cut in canonical_index)
                if where in seen or (shared := intersect_rows(canonical_index, local, rows)) is None:
                    continue  # another rank has the same values
                seen.add(where)
                in_rows, in_file = shared
                target = tensor[in_rows]
                if piece.transposed:
                    in_file = (in_file[1] if len(in_file) > 1 else slice(None), in_file[0])
                    target = target.mT
                self._reader.read(piece.info, in_file, into=target, name=canonical)
        return tensor

    def _add_part(self, placed: Placement, file: RankFile, tensor: RankTensor) -> list[str]:
        """Returns a message if the shape of the shard differs from the expected one."""
        padded = tensor.shape[0] * self._layout.tp if placed.rule.shard == "vocab" else self._arch.vocab_size
        padded = max(padded, self._arch.vocab_size)
        expected, slices = local_slices(placed.rule, self._arch, self._layout, file, padded)
        if tensor.shape != expected:
            return [f"{placed.canonical} is {list(tensor.shape)} in {self._layout.folder(file)}, not {list(expected)}"]
        if placed.rule.shard == "heads":
            tensor = in_current_order(tensor, self.source.version, self._arch.attention.kv_channels)
        at = 0
        for piece in tensor.pieces:
            rows = slice(at, at + piece.shape[0])
            inside = [intersect_rows(local, canonical_index, rows) for canonical_index, local in slices]
            self._parts[placed.canonical].append((piece, [(there, here) for here, there in filter(None, inside)]))
            at = rows.stop
        return []


def _model_file(folder: Path) -> Path | None:
    """A rank's file; None if the folder has only a part of a distributed optimizer."""
    model_file = next((folder / name for name in _FILES if (folder / name).is_file()), None)
    return None if model_file is None and (folder / "optim.pt").is_file() else model_file or folder / FILE


def _open(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(f"{path.parent} has no {path.name}. Fetch the checkpoint again.")
    state = read_torch_pickle(path)
    if not isinstance(state, dict) or not any(str(key).startswith("model") for key in state):
        raise DataError(f"{path} has no model. Fetch it again.")
    return state
