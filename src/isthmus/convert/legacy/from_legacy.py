"""Megatron's legacy files, one ``model_optim_rng.pt`` for each rank of a grid, read rows at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.convert.coverage import told
from isthmus.convert.legacy.legacy_layout import Cuts, Grid, RankFile
from isthmus.convert.legacy.torch_pickle import read_archive
from isthmus.engine.checkpoint.checkpoint_names import live_names
from isthmus.errors import DataError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family, Placement
from isthmus.families.rules.shard import Index, overlap
from isthmus.hf.tensors.safetensors_format import TensorInfo
from isthmus.hf.tensors.slice_reader import TensorReader

FILE = "model_optim_rng.pt"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_GROUPED = re.compile(r"(.*mlp\.experts\.)weight([12])")


@dataclass(frozen=True, slots=True)
class _Shard:
    """One rank's part of a tensor in its file."""

    info: TensorInfo
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape[::-1] if self.transposed else self.info.shape


class LegacyFolder:
    """Every rank's file, opened: places of tensors by the names they have there."""

    def __init__(self, path: Path) -> None:
        """Open the files and find out how the model was cut.

        Raises:
            UnsafeInput: a file names what no checkpoint needs.
            DataError: a file is missing or damaged, or holds no model or no arguments.
            UsageError: its sizes contradict each other.
        """
        self.path = path
        opened = {folder.name: _open(folder / FILE) for folder in sorted(path.glob("mp_rank_*"))}
        some = next(iter(opened.values()))
        self.args: dict[str, Any] = _args(some, path)
        self.grid = Grid(
            tp=_size(self.args, "tensor_model_parallel_size", 1),
            pp=_size(self.args, "pipeline_model_parallel_size", 1),
            ep=_size(self.args, "expert_model_parallel_size", 1),
            etp=_size(self.args, "expert_tensor_parallel_size", None),
            vpp=sum(key.startswith("model") for key in some),
        )
        files = {self.grid.folder(file): file for file in self.grid.files()}
        if absent := [name for name in files if name not in opened]:
            raise DataError(f"{path}: {', '.join(absent[:4])} of {len(files)} ranks missing. Fetch them.")
        if more := [name for name in opened if name not in files]:
            raise DataError(f"{path}: {', '.join(more[:4])} are of no rank of {self.grid}. Remove what is not its own.")
        self.ranks: dict[RankFile, list[dict[str, _Shard]]] = {
            file: [_shards(opened[name].get(self.grid.chunk(number)), self.grid.ep) for number in range(self.grid.vpp)]
            for name, file in files.items()
        }

    def __str__(self) -> str:
        """The path, for messages."""
        return str(self.path)

    def layers(self) -> list[list[int]]:
        """Number of layers of each stage, chunk by chunk, as found in the files."""
        found = [[0] * self.grid.vpp for _ in range(self.grid.pp)]
        for file, chunks in self.ranks.items():
            for number, names in enumerate(chunks):
                here = [int(layer[1]) + 1 for name in names if (layer := _LAYER.match(name))]
                found[file.pp][number] = max([found[file.pp][number], *here])
        return found


class LegacyWeights:
    """The tensors of a model in legacy files under canonical names."""

    def __init__(self, folder: LegacyFolder, family: Family, arch: Architecture) -> None:
        """Find every part of every tensor; what is there and belongs to no model of this architecture fails.

        Raises:
            DataError: tensors are missing, left over, or of another shape.
            UsageError: the sizes that the files name do not fit the model.
        """
        self._folder, self._arch, self._grid = folder, arch, folder.grid
        self._grid.check_sizes(arch)
        self._placements: dict[str, Placement] = {}
        self._parts: dict[str, list[tuple[_Shard, list[tuple[Index, Index]]]]] = {}
        self._reader = TensorReader()
        layers = folder.layers()
        missing, misshapen = [], []
        if (total := sum(map(sum, layers))) != arch.num_layers:
            misshapen.append(f"it has {total} layers, not {arch.num_layers}")
        used: set[tuple[RankFile, int, str]] = set()
        stages = [[file for file in folder.ranks if file.pp == stage] for stage in range(self._grid.pp)]
        cuts = Cuts(self._grid, arch)
        for name, placed in family.placements(arch).items() if not misshapen else ():
            parts = self._parts.setdefault(name, [])
            for stage, chunk, local in self._grid.place(name, arch, layers):
                for file in stages[stage]:
                    if (here := self._grid.on_rank(local, file, arch)) is None:
                        continue
                    shards = folder.ranks[file][chunk]
                    spelled = next((spelling for spelling in live_names(here) if spelling in shards), None)
                    if spelled is None:
                        missing.append(f"{name} (in {self._grid.folder(file)})")
                        continue
                    used.add((file, chunk, spelled))
                    shard = shards[spelled]
                    padded = shard.shape[0] * self._grid.tp if placed.rule.shard == "vocab" else arch.vocab_size
                    wanted, rectangles = cuts.of(placed.rule, file, max(padded, arch.vocab_size))
                    if shard.shape != wanted:
                        rank = self._grid.folder(file)
                        misshapen.append(f"{name} is {list(shard.shape)} in {rank}, not {list(wanted)}")
                        continue
                    parts.append((shard, rectangles))
            if not placed.rule.alias:
                self._placements[name] = placed
        left = [
            f"{name} (in {self._grid.folder(file)})"
            for file, chunks in folder.ranks.items()
            for number, shards in enumerate(chunks)
            for name in (shards if not misshapen else ())
            if (file, number, name) not in used
        ]
        if faults := told(missing=missing, unexpected=left, misshapen=misshapen):
            raise DataError(
                f"{folder} is not the {family.name} model that its config describes: {faults}. "
                "Give the config that fits (--hf-like DIR), or fetch the checkpoint again."
            )

    def __str__(self) -> str:
        """The path, for messages."""
        return str(self._folder)

    def dtype(self, canonical: str) -> torch.dtype:
        """See :class:`~isthmus.convert.canonical.CanonicalWeights`."""
        return self._parts[canonical][0][0].info.dtype

    def read(self, canonical: str, rows: slice) -> Tensor:
        """See :class:`~isthmus.convert.canonical.CanonicalWeights`."""
        shape = self._placements[canonical].rule.canonical_shape(self._arch)
        found = torch.empty((rows.stop - rows.start, *shape[1:]), dtype=self.dtype(canonical))
        seen: set[tuple[tuple[int | None, int | None], ...]] = set()
        for shard, rectangles in self._parts[canonical]:
            for mine, local in rectangles:
                where = tuple((cut.start, cut.stop) for cut in mine)
                if where in seen or (shared := overlap(mine, local, rows)) is None:
                    continue  # other ranks hold the same
                seen.add(where)
                here, there = shared
                target = found[here]
                if shard.transposed:
                    there = (there[1] if len(there) > 1 else slice(None), there[0])
                    target = target.mT
                self._reader.read(shard.info, there, into=target)
        return found


def _open(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise DataError(f"{path.parent} holds no {path.name}. Fetch the checkpoint again.")
    state = read_archive(path)
    if not isinstance(state, dict) or not any(str(key).startswith("model") for key in state):
        raise DataError(f"{path} holds no model. Fetch it again.")
    return state


def _args(state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    args = state.get("args")
    if args is None:
        raise DataError(f"{folder} has no args, so it is not told how it was cut. Fetch the whole checkpoint.")
    return dict(vars(args)) if hasattr(args, "__dict__") else dict(args)


def _size(args: Mapping[str, Any], name: str, default: Any) -> Any:
    value = args.get(name)
    return default if value is None else int(value)


def _shards(state: Any, ep: int) -> dict[str, _Shard]:
    """The tensors of a chunk of layers; experts that lie in one tensor, [in, out] each, are taken apart."""
    found: dict[str, _Shard] = {}
    states = state if isinstance(state, dict) else {}
    for name, info in states.items():
        if not isinstance(info, TensorInfo) or name.endswith("_extra_state"):
            continue
        if (grouped := _GROUPED.fullmatch(name)) is None:
            found[name] = _Shard(info)
            continue
        experts = states[grouped[1].replace("experts.", "router.") + "weight"].shape[0] // ep
        rows, columns = info.shape
        one = (rows, columns // experts) if grouped[2] == "1" else (rows // experts, columns)
        for expert in range(experts):
            place = TensorInfo(info.dtype, one, info.file, info.offset + expert * info.nbytes // experts)
            found[f"{grouped[1]}linear_fc{grouped[2]}.weight{expert}"] = _Shard(place, transposed=True)
    return found
