"""Megatron's legacy files, one ``model_optim_rng.pt`` for each tensor- and pipeline-parallel rank; they are mapped."""

from __future__ import annotations

import mmap
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from isthmus.convert.coverage import told
from isthmus.convert.megatron_args import megatron_args
from isthmus.convert.online import import_weights
from isthmus.convert.pickles import load_plain
from isthmus.convert.source import Meta, WeightSource
from isthmus.engine.names import LINEAR_LAYERS, live_names
from isthmus.errors import DataError, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family, Placement
from isthmus.families.shard import Layout, check_tp_size, local_shape, pieces

FILE = "model_optim_rng.pt"
_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Ranks of a legacy checkpoint, and the chunks of layers that each holds (``vpp`` of them, in turns)."""

    tp: int = 1
    pp: int = 1
    vpp: int = 1

    def check(self, arch: Architecture) -> None:
        """Refuse a grid that the model cannot be cut into.

        Raises:
            UsageError: naming what does not divide.
        """
        check_tp_size(arch, self.tp)
        if self.vpp > 1 and self.pp == 1:
            raise UsageError(f"vpp={self.vpp} needs more than one pipeline stage. Give --pp, or leave --vpp out.")
        if arch.num_layers % (self.pp * self.vpp):
            cut = f"pp={self.pp}" + (f" times vpp={self.vpp}" if self.vpp > 1 else "")
            raise UsageError(f"{cut} does not divide num_layers={arch.num_layers} ({arch.family}). Use fewer.")

    def folder(self, tp_rank: int, pp_rank: int) -> str:
        """Name of a rank's folder."""
        return f"mp_rank_{tp_rank:02d}" + (f"_{pp_rank:03d}" if self.pp > 1 else "")

    def chunk(self, number: int) -> str:
        """Under which key of a rank's file a chunk of layers lies."""
        return "model" if self.vpp == 1 else f"model{number}"

    def place(self, canonical: str, arch: Architecture) -> list[tuple[int, int, str]]:
        """(stage, chunk, name there) of a tensor; the output layer of a tied model only where there are stages."""
        last = (self.pp - 1, self.vpp - 1)
        if not canonical.startswith("decoder.layers."):
            tied_output = canonical == "output_layer.weight" and arch.tie_embeddings
            if tied_output and self.pp == 1:
                return []
            return [(0, 0, canonical)] if canonical.startswith("embedding.") else [(*last, canonical)]
        _, _, number, name = canonical.split(".", 3)
        in_turn, layer = divmod(int(number), arch.num_layers // (self.pp * self.vpp))
        return [(in_turn % self.pp, in_turn // self.pp, f"decoder.layers.{layer}.{name}")]


class LegacyWeights:
    """The tensors of a legacy checkpoint under Hugging Face names; only what is asked for is read."""

    def __init__(self, folder: Path, family: Family, arch: Architecture) -> None:
        """Open every rank's file and find every tensor of the model.

        Raises:
            UnsafeInput: a file holds more than tensors and plain values.
            DataError: files or tensors are missing, left over, or of another shape.
            UsageError: it holds experts, or was cut in a way that this version does not read.
        """
        self._path, self._arch = folder, arch
        self._ranks = _open_ranks(folder)
        args = _args(next(iter(self._ranks.values())), folder)
        self._grid = Grid(
            tp=1 + max(tp for tp, _ in self._ranks),
            pp=1 + max(pp for _, pp in self._ranks),
            vpp=sum(key.startswith("model") for key in next(iter(self._ranks.values()))),
        )
        said = int(args.get("pipeline_model_parallel_size", self._grid.pp))
        if said != self._grid.pp or int(args.get("expert_model_parallel_size", 1)) > 1:
            raise UsageError(f"{folder} is cut by experts, which this version does not read yet.")
        self._grid.check(arch)
        self._parts: dict[str, tuple[Placement, int]] = {}
        self._shards: dict[str, list[Tensor]] = {}
        self._last: tuple[str, Tensor] | None = None
        self.tensors: dict[str, Meta] = {}
        self._find(family)

    def __str__(self) -> str:
        """The path, for messages."""
        return str(self._path)

    def _find(self, family: Family) -> None:
        missing, misshapen, used = [], [], set()
        for name, placement in family.placements(self._arch).items():
            for stage, chunk, local in self._grid.place(name, self._arch):
                states = [self._ranks[tp, stage][self._grid.chunk(chunk)] for tp in range(self._grid.tp)]
                spelled = next((spelling for spelling in live_names(local) if spelling in states[0]), None)
                if spelled is None or any(spelled not in state for state in states):
                    missing.append(name)
                    continue
                used |= {(tp, stage, chunk, spelled) for tp in range(self._grid.tp)}
                if placement.rule.alias:
                    continue
                shards = self._shards[name] = [state[spelled] for state in states]
                for tp, shard in enumerate(shards):
                    wanted = local_shape(placement.rule, self._arch, self._layout(tp, placement, shard))
                    if tuple(shard.shape) != wanted:
                        misshapen.append(f"{name} is {list(shard.shape)} on tp rank {tp}, not {list(wanted)}")
                for number, hf in enumerate(placement.hf):
                    self._parts[hf] = (placement, number)
                    shape = placement.rule.part_shapes(self._arch)[number]
                    self.tensors[hf] = Meta(shards[0].dtype, shape)
        left = [
            f"{key} (rank {tp}, stage {stage})"
            for (tp, stage), state in self._ranks.items()
            for chunk in range(self._grid.vpp)
            for key, value in state[self._grid.chunk(chunk)].items()
            if isinstance(value, Tensor) and not key.endswith("_extra_state") and (tp, stage, chunk, key) not in used
        ]
        if faults := told(missing=missing, unexpected=left, misshapen=misshapen):
            raise DataError(
                f"{self._path} is not the {family.name} model that its config describes: {faults}. "
                "Give the config that fits (--hf-like DIR), or fetch the checkpoint again."
            )

    def _layout(self, tp_rank: int, placement: Placement, shard: Tensor) -> Layout:
        """Its vocabulary is as padded as it is, as long as it holds the model's."""
        padded = shard.size(0) * self._grid.tp if placement.rule.shard == "vocab" and shard.dim() else 0
        return Layout(tp_rank=tp_rank, tp_size=self._grid.tp, padded_vocab_size=max(padded, self._arch.vocab_size))

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        """See :class:`~isthmus.convert.source.WeightSource`. The whole tensor is put together; the last one is kept."""
        if self._last is None or self._last[0] != name:
            self._last = None  # let go of it before the next is made
            self._last = (name, self._whole(name))
        part = self._last[1][index or ...]
        return part if into is None else into.detach().copy_(part)

    def _whole(self, name: str) -> Tensor:
        placement, number = self._parts[name]
        meta = self.tensors[name]
        whole = torch.empty(meta.shape, dtype=meta.dtype)
        for tp, shard in enumerate(self._shards[placement.canonical]):
            for piece in pieces(placement.rule, self._arch, self._layout(tp, placement, shard)):
                if piece.part == number:
                    whole[piece.hf] = piece.view(shard)
        return whole


def _open_ranks(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    ranks: dict[tuple[int, int], dict[str, Any]] = {}
    for path in sorted(folder.glob("mp_rank_*")):
        if (found := _FOLDER.fullmatch(path.name)) is None or not (path / FILE).is_file():
            raise DataError(f"{path} holds no {FILE}. Fetch the checkpoint again.")
        if found[3]:
            raise UsageError(f"{folder} is cut by experts, which this version does not read yet.")
        state = load_plain(path / FILE, path / FILE, mapped=True)
        if not isinstance(state, dict) or not any(key.startswith("model") for key in state):
            raise DataError(f"{path / FILE} holds no model. Fetch it again.")
        ranks[int(found[1]), int(found[2] or 0)] = state
    tp, pp = (1 + max(rank[axis] for rank in ranks) for axis in (0, 1))
    if absent := [f"tp {t}, pp {p}" for t in range(tp) for p in range(pp) if (t, p) not in ranks]:
        raise DataError(f"{folder}: the files of {', '.join(absent)} are missing. Fetch them.")
    return ranks


def _args(state: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    args = state.get("args")
    if args is None:
        raise DataError(f"{folder} has no args, so it is not told how it was cut. Fetch the whole checkpoint.")
    return dict(vars(args)) if hasattr(args, "__dict__") else dict(args)


def write_legacy(
    folder: Path, family: Family, arch: Architecture, source: WeightSource, grid: Grid, dtype: torch.dtype
) -> Iterator[int]:
    """Write a legacy checkpoint into an existing folder, one rank's file at a time; yields the bytes of each.

    The files are laid out first and then filled in place through a mapping, so no rank's share is ever held.

    Raises:
        OSError: the disk refuses; ``hf.staged.disk_errors`` turns it into an error for the user.
    """
    padded = -(-arch.vocab_size // grid.tp) * grid.tp
    for pp_rank in range(grid.pp):
        for tp_rank in range(grid.tp):
            layout = Layout(tp_rank=tp_rank, tp_size=grid.tp, padded_vocab_size=padded)
            chunks: dict[str, dict[str, Any]] = {grid.chunk(number): {} for number in range(grid.vpp)}
            canonical: dict[str, tuple[str, str]] = {}
            for name, placement in family.placements(arch).items():
                for stage, chunk, local in grid.place(name, arch):
                    if stage == pp_rank:
                        shape = local_shape(placement.rule, arch, layout)
                        chunks[grid.chunk(chunk)][local] = torch.empty(shape, dtype=dtype)
                        canonical[name] = (grid.chunk(chunk), local)
            for state in chunks.values():
                linear = [name.removesuffix("weight") for name in state if name.endswith(LINEAR_LAYERS)]
                state.update({f"{name}_extra_state": None for name in linear})
            args = megatron_args(arch, dtype, grid_sizes=(grid.tp, grid.pp, grid.vpp), padded_vocab_size=padded)
            path = folder / grid.folder(tp_rank, pp_rank) / FILE
            path.parent.mkdir()
            with torch.serialization.skip_data():
                torch.save({"args": args, "checkpoint_version": 3.0, "iteration": 0, **chunks}, path)
            mapped = _mapped_for_writing(path)
            live = {name: mapped[chunk][local] for name, (chunk, local) in canonical.items()}
            yield import_weights(live, family, arch, source, layout=layout).num_bytes


def _mapped_for_writing(path: Path) -> dict[str, Any]:
    with torch.serialization.set_default_mmap_options(mmap.MAP_SHARED):
        found: dict[str, Any] = load_plain(path, path, mapped=True)
    return found
