"""From Megatron-LM's arguments to the settings of a run."""

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
from isthmus.config.dialects.megatron.script import Started, read_command, read_training
from isthmus.config.dialects.megatron.train_args import put_train
from isthmus.config.dialects.translation import Translation, World
from isthmus.errors import UsageError

_OTHER_SCRIPTS = ("bert", "t5", "mamba", "vision", "vlm", "retro", "ict", "biencoder", "multimodal", "mimo")


@dataclass(frozen=True, slots=True)
class Told:
    """What was told: all settings but the model, and the model in Megatron-LM's words."""

    translation: Translation
    model: dict[str, Any]
    """Arguments as a checkpoint has them; without ``padded_vocab_size`` where nothing tells the vocabulary. Empty
    where the settings say the model already."""


def from_script(text: str, given: Sequence[str] = (), more: Sequence[str] = (), name: str = "megatron") -> Told:
    """What a shell script tells.

    Args:
        text: of the script.
        given: what it is called with.
        more: arguments of Megatron-LM after its own ones, which win.
        name: of the script, for the run folder if it saves nothing.

    Raises:
        UsageError: the script cannot be read, or an argument is unknown or not to be honoured; all of them.
    """
    started = read_training(text, given)
    return _from_started(started, more, name)


def from_words(words: Sequence[str]) -> Told:
    """What the words of a command tell, with or without the launcher and the Python file before the arguments.

    Raises:
        UsageError: as :func:`from_script`.
    """
    return _from_started(read_command(words), (), "megatron")


def from_arguments(args: Arguments, world: World, name: str, *, model: bool = True) -> Told:
    """What arguments tell, wherever they are from; without ``model`` another has said that.

    Raises:
        UsageError: all that cannot be.
    """
    translation = Translation("sft" if args.get("sft") else "pretrain", world=world)
    take_megablocks(args)
    put_out(args, translation, name)
    args.remark_on_the_rest(translation)
    told = model_arguments(args, translation) if model else {}
    put_tokenizer(args, translation)
    put_data(args, translation)
    put_parallel(args, translation)
    put_moe(args, translation)
    put_train(args, translation)
    put_checkpoints(args, translation)
    put_logging(args, translation)
    args.refuse_if_wrong()
    return Told(translation, told)


def _from_started(started: Started, more: Sequence[str], name: str) -> Told:
    script = PurePath(started.script).stem
    if any(other in script.split("_") for other in _OTHER_SCRIPTS):
        raise UsageError(
            f"{started.script} trains another kind of model. Only decoders of text (pretrain_gpt.py) do here."
        )
    told = from_arguments(read_flags([*started.flags, *more]), started.world, name)
    if started.exported:
        names = " ".join(f"{name}={value}" for name, value in started.exported.items())
        why = "Variables of the environment are the platform's here; it sets what it needs, and never over yours."
        told.translation.remark(f"export {names}", "otherwise", why)
    return told
