"""Opens a model on disk in any format."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

from isthmus.config.model_file import read_model
from isthmus.config.presets import is_model_file
from isthmus.convert.canonical import CanonicalWeights
from isthmus.convert.family_matching import match_family
from isthmus.convert.hf.hf_tensors import HfWeights
from isthmus.convert.hf.hf_weights import open_weights, with_score_head
from isthmus.convert.legacy.from_legacy import LegacyFolder, LegacyWeights
from isthmus.convert.legacy.model_from_args import architecture_from_args
from isthmus.convert.legacy.pre_core_args import pre_core_architecture
from isthmus.convert.merged_weights import MergedWeights
from isthmus.convert.torch_dist.dcp_metadata import METADATA_FILE
from isthmus.convert.torch_dist.from_torch_dist import TorchDistFolder, TorchDistWeights
from isthmus.convert.towers import Towers
from isthmus.engine.checkpoint.tracker import TRACKER, check_tracker
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.family import Family
from isthmus.families.inferred.family_file import FILE as FAMILY_FILE
from isthmus.families.registry import family_for
from isthmus.files.checked_files import ChecksumVerifier, is_trusting
from isthmus.files.remote_files import refuse_url
from isthmus.hf.model_folder import ModelFolder
from isthmus.hf.peft_folder import PeftFolder

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
    towers: Towers | None = None
    """The other tensors of a multimodal model; None if it is none, or if a checkpoint comes without them."""


def open_model(
    path: Path,
    *,
    hf_like: Path | None = None,
    bin: bool = False,
    vocab_size: int | None = None,
    family: Family | None = None,
    adapter: Path | None = None,
    alike: OpenedModel | None = None,
) -> OpenedModel:
    """Open a Hugging Face folder or a Megatron checkpoint, and check that its tensors match its config.

    ``alike`` is the model to compare with; it supplies what the args of a checkpoint without config leave open. The
    other options are those of :func:`isthmus.convert.transfer.convert`.
    """
    refuse_url(path)
    if not path.exists():
        raise MissingInput(f"{path} does not exist. Give a Hugging Face folder or a Megatron checkpoint.")
    if (checkpoint := checkpoint_folder(path)) is not None:
        if bin:
            raise UsageError(f"{path} is a Megatron checkpoint, and --bin is for Hugging Face folders. Omit it.")
        if adapter is not None:
            raise UsageError(
                f"{path} is a Megatron checkpoint, and an adapter is merged into a Hugging Face folder. Convert the "
                f"checkpoint first: isthmus convert {path} DST --to hf"
            )
        return _open_checkpoint(path, checkpoint, hf_like, vocab_size, alike)
    for option, value in (("--hf-like", hf_like), ("--vocab-size", vocab_size)):
        if value is not None:
            raise UsageError(f"{path} is a Hugging Face folder with its own config. Omit {option}.")
    folder = ModelFolder.open(path)
    family = family or family_for(folder.config)
    opened = open_weights(folder, family, bin=bin)
    trained = None if adapter is None else PeftFolder(adapter)
    if trained is not None and trained.has_score_head and not opened.arch.head.score_head:
        opened = with_score_head(opened, family, seed=0)  # the adapter replaces it
    checked = () if (line := folder.check_published(bin=bin)) is None else (line,)
    source, arch, notes = opened.source, opened.arch, (*opened.notes, *checked)
    if trained is not None:
        source = merged = MergedWeights(source, family, arch, trained)
        arch, notes = merged.arch, (*notes, *merged.notes)
    towers = Towers.from_source(source, family)
    return OpenedModel(path, "hf", family, arch, HfWeights(source, family, arch), folder, notes, towers)


def checkpoint_folder(path: Path) -> Path | None:
    """The folder with the checkpoint files: ``path``, or the one in its tracker file; None without either."""
    if (path / METADATA_FILE).is_file() or any(path.glob("mp_rank_*")):
        return path
    tracker = path / TRACKER
    if not tracker.is_file():
        return None
    word = ChecksumVerifier().read_bytes(tracker).decode(errors="replace").strip()
    is_step = re.fullmatch("[0-9]{1,18}", word) is not None
    folder = path / (f"iter_{int(word):07d}" if is_step else "release")
    if not (is_step or word == "release") or not folder.is_dir():
        raise DataError(f"{tracker} names {word!r}, which is not a checkpoint in {path}. Give the checkpoint itself.")
    if is_step and not is_trusting():
        check_tracker(path, int(word))
    return folder


def checkpoint_config(path: Path) -> Path | None:
    """The model folder, with config and tokenizer, of a checkpoint; None if it has none, or is not a checkpoint."""
    if (checkpoint := checkpoint_folder(path)) is None:
        return None
    folders = (at / HF_SUBFOLDER for at in (path, checkpoint, checkpoint.parent))
    return next((folder for folder in folders if (folder / "config.json").is_file()), None)


def _open_checkpoint(
    path: Path, checkpoint: Path, hf_like: Path | None, vocab_size: int | None, alike: OpenedModel | None
) -> OpenedModel:
    legacy = any(checkpoint.glob("mp_rank_*"))
    folder = LegacyFolder(checkpoint) if legacy else TorchDistFolder(checkpoint)
    if isinstance(folder, TorchDistFolder) and any(key.startswith("adapters.") for key in folder.tensors):
        raise UsageError(
            f"{path} has the adapters of a run with lora and not its base model. Merge the adapter that the run "
            "exports: isthmus merge BASE RUN/adapter OUT. To export this step, run the same command with another "
            f"--out, checkpoint.resume={checkpoint} and train.steps set to the step."
        )
    config = hf_like or checkpoint_config(path)
    notes: tuple[str, ...] = ()
    if config is None:
        hf_folder = None
        family, arch, notes = _from_args(folder, vocab_size, alike)
    else:
        preset = is_model_file(str(config))  # has no tokenizer
        hf_folder = ModelFolder.from_config(config, read_model(str(config))) if preset else ModelFolder.open(config)
        if vocab_size is not None:
            raise UsageError(f"{hf_folder} sets the vocabulary size. Omit --vocab-size.")
        around = (path, checkpoint, checkpoint.parent)
        family_file = next((at / FAMILY_FILE for at in around if (at / FAMILY_FILE).is_file()), None)
        if family_file is not None:
            ChecksumVerifier().check(family_file)
        family = family_for(hf_folder.config, family_file)
        arch = family.to_architecture(hf_folder.config)
    towers = None if hf_folder is None else Towers.from_checkpoint(hf_folder, family)
    opened = partial(OpenedModel, path, family=family, arch=arch, hf_folder=hf_folder, notes=notes, towers=towers)
    if isinstance(folder, LegacyFolder):
        return opened("torch", weights=LegacyWeights(folder, family, arch))
    return opened("torch_dist", weights=TorchDistWeights(folder, family, arch))


def _from_args(
    folder: LegacyFolder | TorchDistFolder, vocab_size: int | None, alike: OpenedModel | None
) -> tuple[Family, Architecture, tuple[str, ...]]:
    """Family and architecture that the args describe, and notes for the user."""
    if (args := folder.args) is None:
        raise MissingInput(f"{folder} has neither a config nor args. Give the model's folder: --hf-like DIR.")
    try:
        if isinstance(folder, LegacyFolder) and folder.pre_core_names:
            arch, notes = pre_core_architecture(args, folder.pre_core_names, vocab_size)
        else:
            arch, notes = architecture_from_args(args, vocab_size)
        if alike is not None and notes:
            arch = replace(arch, vocab_size=min(arch.vocab_size, alike.arch.vocab_size))
        family, arch, others = match_family(arch, first=alike.family.name if alike is not None else None)
    except (DataError, UsageError) as error:
        raise type(error)(
            f"{folder}: {error} If the model has a Hugging Face config, give it: --hf-like DIR."
        ) from error
    also = f"; {', '.join(others)} would also fit" if others else ""
    tokenizer = args.get("tokenizer_model") or args.get("tokenizer_type") or "of the training"
    lines = (
        f"the checkpoint has no config: by its args its family is {family.name}{also}. "
        "Choose another with --hf-like DIR.",
        *notes,
        f"the checkpoint has no tokenizer: copy the one it was trained with ({tokenizer}).",
    )
    return family, arch, lines
