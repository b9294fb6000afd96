"""A model on the disk, in whichever format: its tensors under canonical names, and what else is known of it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from isthmus.config.model_file import read_model
from isthmus.config.presets import is_model_file
from isthmus.convert.canonical import CanonicalWeights
from isthmus.convert.family_matching import fit
from isthmus.convert.hf.from_hf import WovenWeights
from isthmus.convert.hf.hf_weights import open_weights
from isthmus.convert.legacy.from_legacy import LegacyFolder, LegacyWeights
from isthmus.convert.legacy.model_from_args import architecture_of
from isthmus.convert.torch_dist.from_torch_dist import TorchDistFolder, TorchDistWeights, checkpoint_folder
from isthmus.errors import DataError, MissingInput, UsageError
from isthmus.families.architecture import Architecture
from isthmus.families.discover.json_family import FILE
from isthmus.families.family import Family
from isthmus.families.registry import family_for
from isthmus.hf.model_folder import ModelFolder

Format = Literal["hf", "torch_dist", "torch"]
HF_PART = "hf"
"""Folder beside a converted checkpoint, and in one of a run, that carries the config and the tokenizer along."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A model on the disk, opened."""

    path: Path
    format: Format
    family: Family
    arch: Architecture
    weights: CanonicalWeights
    like: ModelFolder | None
    """Where its config, tokenizer and other small files are; None if it has none and its arguments describe it."""
    said: tuple[str, ...] = ()
    """What was decided on the way in, a line each, for the user."""


def open_stored(
    path: Path,
    hf_like: Path | None = None,
    *,
    bin: bool = False,
    vocab_size: int | None = None,
    alike: Stored | None = None,
    family: Family | None = None,
) -> Stored:
    """Open a Hugging Face folder or a Megatron checkpoint, and check that its tensors are those of its config.

    Args:
        path: the model folder, or a checkpoint, or a folder of checkpoints with a tracker file.
        hf_like: a Hugging Face folder (weights are not needed) or ``preset:NAME``, whose config describes a checkpoint
            that brings none; without it the arguments of the training that wrote the checkpoint do.
        bin: read ``pytorch_model*.bin`` of a Hugging Face folder instead of safetensors.
        vocab_size: rows of the embedding that are not padding, of a checkpoint that only its arguments describe.
        alike: what it may be the same model as: what its arguments leave open is taken from there.
        family: of a Hugging Face folder, where it was learned; None finds it by the config.

    Raises:
        MissingInput, DataError, UnsafeInput, UsageError: it is neither, or damaged, or not what its config says.
    """
    if not path.exists():
        raise MissingInput(f"{path} is not there. Give a Hugging Face folder or a Megatron checkpoint.")
    checkpoint = checkpoint_folder(path)
    if checkpoint is None:
        if hf_like is not None:
            raise UsageError(f"{path} is a Hugging Face folder and has a config; leave --hf-like out.")
        if vocab_size is not None:
            raise UsageError(f"{path} is a Hugging Face folder and has a config; leave --vocab-size out.")
        like = ModelFolder.open(path)
        family = family or family_for(like.config)
        opened = open_weights(like, family, bin=bin)
        woven = WovenWeights(opened.source, family, opened.arch)
        return Stored(path, "hf", family, opened.arch, woven, like, opened.said)
    if bin:
        raise UsageError(f"{path} is a Megatron checkpoint, and --bin is for Hugging Face folders; leave it out.")
    legacy = any(checkpoint.glob("mp_rank_*"))
    folder = LegacyFolder(checkpoint) if legacy else TorchDistFolder(checkpoint)
    around = (path, checkpoint, checkpoint.parent)
    config = hf_like or next((at / HF_PART for at in around if (at / HF_PART / "config.json").is_file()), None)
    known = None if config is None else _open_like(config)
    if known is None:
        family, arch, said = _from_args(folder, vocab_size, alike)
    elif vocab_size is not None:
        raise UsageError(f"{known} says how large the vocabulary is; leave --vocab-size out.")
    else:
        family = family_for(known.config, next((at / FILE for at in around if (at / FILE).is_file()), None))
        arch, said = family.to_architecture(known.config), ()
    if isinstance(folder, LegacyFolder):
        return Stored(path, "torch", family, arch, LegacyWeights(folder, family, arch), known, said)
    return Stored(path, "torch_dist", family, arch, TorchDistWeights(folder, family, arch), known, said)


def _open_like(named: Path) -> ModelFolder:
    """A model's folder, or one of the models that come along, which have no tokenizer."""
    if is_model_file(str(named)):
        return ModelFolder.described(named, read_model(str(named)))
    return ModelFolder.open(named)


def _from_args(
    folder: LegacyFolder | TorchDistFolder, vocab_size: int | None, alike: Stored | None
) -> tuple[Family, Architecture, tuple[str, ...]]:
    """The family whose config says what the checkpoint's arguments do, and what the user has to know of that."""
    if (args := folder.args) is None:
        raise MissingInput(f"{folder} does not say which model it is. Give the model's folder: --hf-like DIR.")
    try:
        arch, said = architecture_of(args, vocab_size)
        if alike is not None and said:
            arch = replace(arch, vocab_size=min(arch.vocab_size, alike.arch.vocab_size))
        found = fit(arch, first=alike.family.name if alike is not None else None)
    except (DataError, UsageError) as error:
        raise type(error)(
            f"{folder}: {error} If the model has a Hugging Face config, give it: --hf-like DIR."
        ) from error
    others = f"; {', '.join(found.others)} would say the same" if found.others else ""
    tokenizer = args.get("tokenizer_model") or args.get("tokenizer_type") or "of the training"
    return (
        found.family,
        found.arch,
        (
            f"no config came with the checkpoint: by its args it is a {found.family.name} model{others}. "
            "Another is chosen with --hf-like DIR.",
            *said,
            f"there is no tokenizer in the checkpoint: copy the one it was trained with ({tokenizer}).",
        ),
    )
