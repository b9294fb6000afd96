"""Translates Megatron-LM's arguments to the settings of a run, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from isthmus.config.dialects.megatron.arguments import Arguments, WrittenArguments, read_flags
from isthmus.config.dialects.megatron.data_args import put_data, write_data
from isthmus.config.dialects.megatron.model_args import model_arguments, put_tokenizer, write_model, write_tokenizer
from isthmus.config.dialects.megatron.moe_args import put_moe, take_megablocks, take_shared_experts, write_moe
from isthmus.config.dialects.megatron.output_args import put_checkpoints, put_logging, put_out, write_output
from isthmus.config.dialects.megatron.parallel_args import put_parallel, write_parallel
from isthmus.config.dialects.megatron.train_args import put_train, write_train
from isthmus.config.dialects.megatron.training_command import TrainingCommand
from isthmus.config.dialects.translation import Translation, World
from isthmus.config.schema import RunConfig
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
    args = read_flags([*command.flags, *more])
    if not any(args.get(name) for name in ("data_path", "train_data_path", "mock_data")):
        args.errors.append("--data-path  is missing (or --train-data-path, or --mock-data)")
    translated = translate_arguments(args, command.world, name)
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
    take_shared_experts(args)
    put_out(args, translation, name)
    args.add_remarks(translation)
    described = model_arguments(args, translation) if model else {}
    put_tokenizer(args, translation)
    put_data(args, translation)
    put_parallel(args, translation)
    put_moe(args, translation)
    put_train(args, translation, model=model)
    put_checkpoints(args, translation)
    put_logging(args, translation)
    args.raise_errors()
    return MegatronTranslation(translation, described)


def write_arguments(config: RunConfig, model: Mapping[str, Any], rows: int) -> WrittenArguments:
    """Megatron-LM's arguments for a run, the inverse of :func:`translate_arguments`.

    ``model`` are Megatron-LM's args of the model's architecture, ``rows`` the rows of its embedding. The dropout rates
    of the config are not null. A UsageError if Megatron-LM has no such run.
    """
    if config.recipe not in ("sft", "pretrain"):
        raise UsageError(
            f"recipe {config.recipe}: Megatron-LM's arguments have no such training, only sft and pretrain."
        )
    written = WrittenArguments(config)
    written.set("sft", config.recipe == "sft", "recipe")
    write_model(model, written)
    write_tokenizer(written, rows)
    write_data(written)
    write_parallel(written)
    if model["num_experts"]:
        write_moe(written, expert_bias=model["moe_router_enable_expert_bias"])
    write_train(written, mtp=bool(model["mtp_num_layers"]))
    write_output(written)
    written.remark_on_the_rest()
    return written
