"""Translates Megatron-LM's arguments to the settings of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from isthmus.config.dialects.megatron.arguments import Arguments, read_flags
from isthmus.config.dialects.megatron.data_args import put_data
from isthmus.config.dialects.megatron.model_args import model_arguments, put_tokenizer
from isthmus.config.dialects.megatron.moe_args import put_moe, take_megablocks
from isthmus.config.dialects.megatron.output_args import put_checkpoints, put_logging, put_out
from isthmus.config.dialects.megatron.parallel_args import put_parallel
from isthmus.config.dialects.megatron.train_args import put_train
from isthmus.config.dialects.megatron.training_command import TrainingCommand
from isthmus.config.dialects.translation import Translation, World
from isthmus.errors import UsageError

_OTHER_SCRIPTS = ("bert", "t5", "mamba", "vision", "vlm", "retro", "ict", "biencoder", "multimodal", "mimo")


@dataclass(frozen=True, slots=True)
class MegatronTranslation:
    """A Megatron-LM run: its settings except the model, and the model as Megatron-LM's arguments."""

    translation: Translation
    model: dict[str, Any]
    """As in a Megatron-LM checkpoint; without ``padded_vocab_size`` if no argument gives the vocabulary size. Empty if
    the settings name the model.
    """


def translate_command(
    command: TrainingCommand, more: Sequence[str] = (), name: str = "megatron"
) -> MegatronTranslation:
    """``more`` are further Megatron-LM arguments, which win. ``name`` is the run folder if the run saves nothing.

    A UsageError contains all errors.
    """
    if any(other in PurePath(command.script).stem.split("_") for other in _OTHER_SCRIPTS):
        raise UsageError(
            f"{command.script} trains another kind of model. Isthmus trains text decoders (pretrain_gpt.py)."
        )
    translated = translate_arguments(read_flags([*command.flags, *more]), command.world, name)
    if command.environment:
        variables = " ".join(f"{name}={value}" for name, value in command.environment.items())
        why = "Isthmus sets the environment variables that its platform needs, and keeps those that you set."
        translated.translation.remark(f"export {variables}", "different", why)
    for other in command.not_run:
        why = "It was not run: it may be another training run, without --num-layers, --micro-batch-size and --lr."
        translated.translation.remark(other, "unsupported", why)
    return translated


def translate_arguments(args: Arguments, world: World, name: str, *, model: bool = True) -> MegatronTranslation:
    """Without ``model``, ``args`` do not describe the model. A UsageError contains all errors."""
    translation = Translation("sft" if args.get("sft") else "pretrain", world=world)
    take_megablocks(args)
    put_out(args, translation, name)
    args.add_remarks(translation)
    described = model_arguments(args, translation) if model else {}
    put_tokenizer(args, translation)
    put_data(args, translation)
    put_parallel(args, translation)
    put_moe(args, translation)
    put_train(args, translation)
    put_checkpoints(args, translation)
    put_logging(args, translation)
    args.raise_errors()
    return MegatronTranslation(translation, described)
