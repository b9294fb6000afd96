"""Patches with which tools/checkpoint/convert.py of Megatron-LM core 0.15 and 0.16 runs, which it does not by itself.

Its models ask for process groups that the script does not create, its loader drops the builder of the model, and its
saver asks for TransformerEngine.
"""

from __future__ import annotations

import argparse
import functools
import re
from collections.abc import Callable
from typing import Any

import torch

from isthmus.engine.upstream.import_hooks import patch_on_import
from isthmus.errors import UsageError

Say = Callable[[str], None]
_GROUP = re.compile("[A-Z_]+_GROUP(_WITH_CP)?")


def install(say: Say, *, without_te: bool) -> None:
    """Patch the modules of the script, when it imports them."""
    patch_on_import("loader_core", functools.partial(_provider_with_builder, say))
    patch_on_import("loader_base", lambda base: _patch_groups(say, base.MegatronCheckpointLoaderBase, "loader"))
    patch_on_import("loader_base", _args_of_training)
    patch_on_import("saver_base", lambda base: _patch_groups(say, base.MegatronCheckpointSaverBase, "saver"))
    patch_on_import("loader_llama_mistral", functools.partial(_any_transformers, say))
    patch_on_import("megatron.legacy.model.utils", _norms_without_their_argument)
    if without_te:
        patch_on_import("saver_base", functools.partial(_skip_version_check, say))
        for name in ("loader_core", "loader_llava", "saver_core", "saver_llava"):
            patch_on_import(name, functools.partial(_local_layers, say))


def _provider_with_builder(say: Say, loader: Any) -> None:
    """``import_model_provider`` stores the provider with its builder, and returns it without."""
    cls = loader.MegatronCheckpointLoaderLLM
    find = cls.import_model_provider

    @functools.wraps(find)
    def import_model_provider(self: Any) -> Any:
        checkpoint_args = find(self)
        return getattr(self, "model_provider", None) or checkpoint_args

    cls.import_model_provider = import_model_provider
    say("convert: the loader builds its model with the model builder, which it forgets")


def _any_transformers(say: Say, loader: Any) -> None:
    """Its check takes the minor version alone: 5.0 counts as older than 4.31."""
    loader.verify_transformers_version = lambda: None
    say("convert: the loader takes every version of transformers")


def _norms_without_their_argument(utils: Any) -> None:
    """Legacy models, which the loader builds, read ``args.apply_layernorm_1p``; core 0.16 has no such argument."""
    read = utils.get_args

    def get_args() -> Any:
        args = read()
        args.apply_layernorm_1p = getattr(args, "apply_layernorm_1p", False)
        return args

    utils.get_args = get_args


def _args_of_training(base: Any) -> None:
    """A checkpoint of isthmus convert has no arguments of a training: they would override the user's.

    The saver gets a tokenizer for its parser and builds none; it writes that of the source.
    """
    cls = base.MegatronCheckpointLoaderBase
    ensure = cls.ensure_required_arguments

    @functools.wraps(ensure)
    def ensure_required_arguments(self: Any) -> None:
        self.margs.tokenizer_type = self.margs.tokenizer_type or "NullTokenizer"
        checkpoint_args = self.checkpoint_args
        for name in ("sequence_parallel", "apply_query_key_layer_scaling"):
            setattr(checkpoint_args, name, getattr(checkpoint_args, name, False))
        ensure(self)

    cls.ensure_required_arguments = ensure_required_arguments


def _patch_groups(say: Say, cls: Any, name: str) -> None:
    initialize = cls.initialize_megatron_env

    @functools.wraps(initialize)
    def initialize_megatron_env(self: Any) -> None:
        args = getattr(self, "checkpoint_args", None)
        if getattr(args, "qk_layernorm", False):
            raise UsageError(
                "tools/checkpoint/convert.py has no names for the norms of queries and keys (--qk-layernorm) and would "
                "drop them. Use isthmus convert."
            )
        initialize(self)
        _fill_groups()

    cls.initialize_megatron_env = initialize_megatron_env
    say(f"convert: the {name} gets process groups of one rank, which its models ask for")


class _PipelineRanks:
    """A process group with the rank and size that the script sets."""

    def rank(self) -> int:
        from megatron.core import parallel_state

        return int(parallel_state.get_pipeline_model_parallel_rank())

    def size(self) -> int:
        from megatron.core import parallel_state

        return int(parallel_state.get_pipeline_model_parallel_world_size())


def _fill_groups() -> None:
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    groups = vars(parallel_state)
    for name in [name for name, group in groups.items() if group is None and _GROUP.fullmatch(name)]:
        pipeline = name == "_PIPELINE_MODEL_PARALLEL_GROUP"
        groups[name] = _PipelineRanks() if pipeline else torch.distributed.group.WORLD


def _skip_version_check(say: Say, saver: Any) -> None:
    version = saver.version
    saver.version = lambda name: "2.0.0" if name == "transformer-engine" else version(name)
    say("convert: the saver does not check the version of TransformerEngine, for layers that are not used")


def _local_layers(say: Say, plugin: Any) -> None:
    """The default of ``--loader-transformer-impl`` and ``--saver-transformer-impl`` is TransformerEngine."""
    add = plugin.add_arguments

    def local(value: str) -> str:
        if value == "transformer_engine":
            raise argparse.ArgumentTypeError(
                "TransformerEngine is missing. Use local, or isthmus convert, which writes both spellings of the names"
            )
        return value

    @functools.wraps(add)
    def add_arguments(parser: Any) -> None:
        add(parser)
        for action in parser._actions:
            if action.dest.endswith("_transformer_impl"):
                action.type = local
                if action.default == "transformer_engine":
                    action.default = "local"
                    say(f"arguments: {action.option_strings[0]} local (TransformerEngine is missing)")

    plugin.add_arguments = add_arguments
