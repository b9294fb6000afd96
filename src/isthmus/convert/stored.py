"""A model on the disk, in whichever format: its tensors under canonical names, and what else is known of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from isthmus.convert.canonical import CanonicalWeights
from isthmus.convert.from_hf import WovenWeights
from isthmus.convert.from_legacy import LegacyFolder, LegacyWeights
from isthmus.convert.from_torch_dist import TorchDistFolder, TorchDistWeights, checkpoint_folder
from isthmus.convert.hf_weights import open_weights
from isthmus.errors import MissingInput, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.registry import family_for
from isthmus.hf.folder import ModelFolder

Format = Literal["hf", "torch_dist", "torch"]
HF_PART = "hf"
"""Folder beside a converted checkpoint that carries the config and the tokenizer along."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A model on the disk, opened."""

    path: Path
    format: Format
    family: Family
    arch: Architecture
    weights: CanonicalWeights
    like: ModelFolder
    """Where its config, tokenizer and other small files are."""
    said: tuple[str, ...] = ()
    """What was decided on the way in, a line each, for the user."""


def open_stored(path: Path, hf_like: Path | None = None, *, bin: bool = False) -> Stored:
    """Open a Hugging Face folder or a Megatron checkpoint, and check that its tensors are those of its config.

    Args:
        path: the model folder, or a checkpoint, or a folder of checkpoints with a tracker file.
        hf_like: a Hugging Face folder (weights are not needed) whose config describes a checkpoint that brings none.
        bin: read ``pytorch_model*.bin`` of a Hugging Face folder instead of safetensors.

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
        opened = open_weights(like, family, bin=bin)
        woven = WovenWeights(opened.source, family, opened.arch)
        return Stored(path, "hf", family, opened.arch, woven, like, opened.said)
    if bin:
        raise UsageError(f"{path} is a Megatron checkpoint, and --bin is for Hugging Face folders; leave it out.")
    beside = [folder / HF_PART for folder in (path, checkpoint.parent)]
    config = hf_like or next((folder for folder in beside if (folder / "config.json").is_file()), None)
    if config is None:
        raise MissingInput(f"{path} does not say which model it is. Give the model's folder: --hf-like DIR.")
    like = ModelFolder.open(config)
    family = family_for(like.config)
    arch = family.to_architecture(like.config)
    if any(checkpoint.glob("mp_rank_*")):
        return Stored(path, "torch", family, arch, LegacyWeights(LegacyFolder(checkpoint), family, arch), like)
    weights = TorchDistWeights(TorchDistFolder(checkpoint), family, arch)
    return Stored(path, "torch_dist", family, arch, weights, like)
