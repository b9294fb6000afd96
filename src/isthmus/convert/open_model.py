"""Opens a model on disk in any format."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from isthmus.config.model_file import read_model
from isthmus.config.presets import is_model_file
from isthmus.convert.canonical import CanonicalWeights
from isthmus.convert.family_matching import match_family
from isthmus.convert.hf.from_hf import HfWeights
from isthmus.convert.hf.hf_weights import open_weights
from isthmus.convert.legacy.from_legacy import LegacyFolder, LegacyWeights
from isthmus.convert.legacy.model_from_args import architecture_from_args
from isthmus.convert.torch_dist.dcp_metadata import METADATA_FILE
from isthmus.convert.torch_dist.from_torch_dist import TorchDistFolder, TorchDistWeights
from isthmus.engine.checkpoint.checkpoint_names import TRACKER
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.discover.json_family import FILE as FAMILY_FILE
from isthmus.families.family import Family
from isthmus.families.registry import family_for
from isthmus.hf.model_folder import ModelFolder

Format = Literal["hf", "torch_dist", "torch"]
HF_SUBFOLDER = "hf"
"""Subfolder of a converted checkpoint, or of a run's checkpoint, with config.json and the tokenizer."""


@dataclass(frozen=True, slots=True)
class OpenedModel:
    path: Path
    format: Format
    family: Family
    arch: Architecture
    weights: CanonicalWeights
    hf_folder: ModelFolder | None
    """Config, tokenizer and other small files; None if only the checkpoint's args describe the model."""
    notes: tuple[str, ...] = ()
    """Decisions made while opening the model, for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """How to open a model; see :func:`isthmus.convert.transfer.convert`."""

    hf_like: Path | None = None
    bin: bool = False
    vocab_size: int | None = None
    family: Family | None = None


def open_model(path: Path, options: SourceOptions | None = None, *, alike: OpenedModel | None = None) -> OpenedModel:
    """Open a Hugging Face folder or a Megatron checkpoint, and check that its tensors match its config.

    ``alike`` is the model to compare with; it supplies what the args of a checkpoint without config leave open.
    """
    options = options or SourceOptions()
    if not path.exists():
        raise MissingInput(f"{path} does not exist. Give a Hugging Face folder or a Megatron checkpoint.")
    checkpoint = checkpoint_folder(path)
    return _open_hf(path, options) if checkpoint is None else _open_checkpoint(path, checkpoint, options, alike)


def checkpoint_folder(path: Path) -> Path | None:
    """The folder with the checkpoint files: ``path``, or the one in its tracker file; None without either."""
    if (path / METADATA_FILE).is_file() or any(path.glob("mp_rank_*")):
        return path
    tracker = path / TRACKER
    if not tracker.is_file():
        return None
    word = tracker.read_text(encoding="utf-8", errors="replace").strip()
    folder = path / (f"iter_{int(word):07d}" if word.isascii() and word.isdigit() else "release")
    if (word != "release" and not word.isdigit()) or not folder.is_dir():
        raise DataError(f"{tracker} names {word!r}, which is not a checkpoint in {path}. Give the checkpoint itself.")
    return folder


def _open_hf(path: Path, options: SourceOptions) -> OpenedModel:
    for option, value in (("--hf-like", options.hf_like), ("--vocab-size", options.vocab_size)):
        if value is not None:
            raise UsageError(f"{path} is a Hugging Face folder with its own config. Leave {option} out.")
    folder = ModelFolder.open(path)
    family = options.family or family_for(folder.config)
    opened = open_weights(folder, family, bin=options.bin)
    weights = HfWeights(opened.source, family, opened.arch)
    return OpenedModel(path, "hf", family, opened.arch, weights, folder, opened.notes)


def _open_checkpoint(path: Path, checkpoint: Path, options: SourceOptions, alike: OpenedModel | None) -> OpenedModel:
    if options.bin:
        raise UsageError(f"{path} is a Megatron checkpoint, and --bin is for Hugging Face folders. Leave it out.")
    legacy = any(checkpoint.glob("mp_rank_*"))
    folder = LegacyFolder(checkpoint) if legacy else TorchDistFolder(checkpoint)
    around = (path, checkpoint, checkpoint.parent)
    config = options.hf_like or next(
        (at / HF_SUBFOLDER for at in around if (at / HF_SUBFOLDER / "config.json").is_file()), None
    )
    notes: tuple[str, ...] = ()
    if config is None:
        hf_folder = None
        family, arch, notes = _from_args(folder, options.vocab_size, alike)
    else:
        hf_folder = _open_config(config)
        if options.vocab_size is not None:
            raise UsageError(f"{hf_folder} sets the vocabulary size. Leave --vocab-size out.")
        family_file = next((at / FAMILY_FILE for at in around if (at / FAMILY_FILE).is_file()), None)
        family = family_for(hf_folder.config, family_file)
        arch = family.to_architecture(hf_folder.config)
    if isinstance(folder, LegacyFolder):
        return OpenedModel(path, "torch", family, arch, LegacyWeights(folder, family, arch), hf_folder, notes)
    return OpenedModel(path, "torch_dist", family, arch, TorchDistWeights(folder, family, arch), hf_folder, notes)


def _open_config(path: Path) -> ModelFolder:
    """A model folder or a preset; a preset has no tokenizer."""
    if is_model_file(str(path)):
        return ModelFolder.from_config(path, read_model(str(path)))
    return ModelFolder.open(path)


def _from_args(
    folder: LegacyFolder | TorchDistFolder, vocab_size: int | None, alike: OpenedModel | None
) -> tuple[Family, Architecture, tuple[str, ...]]:
    """Family and architecture that the args describe, and notes for the user."""
    if (args := folder.args) is None:
        raise MissingInput(f"{folder} has neither a config nor args. Give the model's folder: --hf-like DIR.")
    try:
        arch, notes = architecture_from_args(args, vocab_size)
        if alike is not None and notes:
            arch = replace(arch, vocab_size=min(arch.vocab_size, alike.arch.vocab_size))
        found = match_family(arch, first=alike.family.name if alike is not None else None)
    except (DataError, UsageError) as error:
        raise type(error)(
            f"{folder}: {error} If the model has a Hugging Face config, give it: --hf-like DIR."
        ) from error
    others = f"; {', '.join(found.others)} would also fit" if found.others else ""
    tokenizer = args.get("tokenizer_model") or args.get("tokenizer_type") or "of the training"
    return (
        found.family,
        found.arch,
        (
            f"the checkpoint has no config: by its args it is a {found.family.name} model{others}. "
            "Choose another with --hf-like DIR.",
            *notes,
            f"the checkpoint has no tokenizer: copy the one it was trained with ({tokenizer}).",
        ),
    )
