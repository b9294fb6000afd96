"""A model on the disk, in whichever format: its tensors under Hugging Face names, and what else is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from isthmus.convert.coverage import check_coverage, told
from isthmus.convert.legacy import LegacyWeights
from isthmus.convert.source import Meta, WeightSource
from isthmus.convert.torch_dist import TorchDistFolder, checkpoint_folder
from isthmus.engine.names import is_model_key, torch_dist_keys
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family, Placement
from isthmus.families.registry import family_for
from isthmus.families.shard import pieces
from isthmus.families.shard import whole as not_cut
from isthmus.hf.folder import ModelFolder

Format = Literal["hf", "torch_dist", "torch"]
HF_PART = "hf"
"""Folder beside a converted checkpoint that carries the config and the tokenizer along."""


class MegatronWeights:
    """The tensors of a ``torch_dist`` checkpoint, taken apart into those of Hugging Face."""

    def __init__(self, folder: TorchDistFolder, family: Family, arch: Architecture) -> None:
        """Find every tensor of the model; those that are there and belong to no model of this architecture fail.

        Raises:
            DataError: tensors are missing, left over, or of another shape.
        """
        self._folder, self._arch = folder, arch
        self._places: dict[str, tuple[str, int | None]] = {}
        self._parts: dict[str, tuple[Placement, int]] = {}
        self.tensors: dict[str, Meta] = {}
        missing, misshapen = [], []
        for name, placement in family.placements(arch).items():
            if placement.rule.alias:
                continue
            spelled = [place for place in torch_dist_keys(name) if place[0] in folder.tensors]
            if not spelled:
                missing.append(torch_dist_keys(name)[0][0])
                continue
            key, layer = self._places[name] = spelled[0]
            found, wanted = folder.shape(key, layer), placement.rule.canonical_shape(arch)
            # The vocabulary may be padded; everything else is as it is.
            if found != wanted and not (placement.rule.shard == "vocab" and found > wanted and found[1:] == wanted[1:]):
                misshapen.append(f"{key} is {list(found)}, not {list(wanted)}")
            dtype = folder.tensors[key].properties.dtype
            for number, hf in enumerate(placement.hf):
                self._parts[hf] = (placement, number)
                self.tensors[hf] = Meta(dtype, placement.rule.part_shapes(arch)[number])
        used = {key for key, _ in self._places.values()}
        left = [key for key in folder.tensors if is_model_key(key) and key not in used]
        deep = [key for key, layer in self._places.values() if layer is not None]
        misshapen += [
            f"{key} has {folder.tensors[key].size[0]} layers, not {arch.num_layers}"
            for key in dict.fromkeys(deep)
            if folder.tensors[key].size[0] != arch.num_layers
        ]
        if faults := told(missing=sorted(set(missing)), unexpected=left, misshapen=misshapen):
            raise DataError(
                f"{folder} is not the {family.name} model that its config describes: {faults}. "
                "Give the config that fits (--hf-like DIR), or fetch the checkpoint again."
            )
        self._last: tuple[str, list[Tensor]] | None = None

    def __str__(self) -> str:
        """The path, for messages."""
        return str(self._folder)

    def read(self, name: str, index: tuple[slice, ...] | None = None, *, into: Tensor | None = None) -> Tensor:
        """See :class:`~isthmus.convert.source.WeightSource`. The parts of the tensor read last are kept."""
        placement, number = self._parts[name]
        if self._last is None or self._last[0] != placement.canonical:
            self._last = None  # let go of it before the next is made
            whole = self._folder.read(*self._places[placement.canonical])
            rows = placement.rule.canonical_shape(self._arch)[0]
            shapes = [self.tensors[hf].shape for hf in placement.hf]
            parts = [torch.empty(shape, dtype=whole.dtype) for shape in shapes]
            for piece in pieces(placement.rule, self._arch, not_cut(self._arch), placement.expert):
                parts[piece.part][piece.hf] = piece.view(whole[:rows])
            self._last = (placement.canonical, parts)
        part = self._last[1][number][index or ...]
        return part if into is None else into.detach().copy_(part)


@dataclass(frozen=True, slots=True)
class Stored:
    """A model on the disk, opened."""

    format: Format
    family: Family
    arch: Architecture
    weights: WeightSource
    like: ModelFolder
    """Where its config, tokenizer and other small files are."""


def open_stored(path: Path, hf_like: Path | None = None) -> Stored:
    """Open a Hugging Face folder or a Megatron checkpoint, and check that its tensors are those of its config.

    Args:
        path: the model folder, or a checkpoint, or a folder of checkpoints with a tracker file.
        hf_like: a Hugging Face folder (weights are not needed) whose config describes a checkpoint that brings none.

    Raises:
        MissingInput, DataError, UnsafeInput, UsageError: it is neither, or damaged, or not what its config says.
    """
    if not path.exists():
        raise MissingInput(f"{path} is not there. Give a Hugging Face folder or a Megatron checkpoint.")
    checkpoint = checkpoint_folder(path)
    if checkpoint is None:
        if hf_like is not None:
            raise UsageError(f"{path} is a Hugging Face folder and has a config; leave --hf-like out.")
        like = ModelFolder.open(path)
        family = family_for(like.config)
        arch = family.to_architecture(like.config)
        check_coverage(like, family, arch)
        return Stored("hf", family, arch, like, like)
    beside = [folder / HF_PART for folder in (path, checkpoint.parent)]
    config = hf_like or next((folder for folder in beside if (folder / "config.json").is_file()), None)
    if config is None:
        raise MissingInput(f"{path} does not say which model it is. Give the model's folder: --hf-like DIR.")
    like = ModelFolder.open(config)
    family = family_for(like.config)
    arch = family.to_architecture(like.config)
    if any(checkpoint.glob("mp_rank_*")):
        return Stored("torch", family, arch, LegacyWeights(checkpoint, family, arch), like)
    weights = MegatronWeights(TorchDistFolder(checkpoint), family, arch)
    return Stored("torch_dist", family, arch, weights, like)
