"""Patches with which unmodified scripts of Megatron-LM run without TransformerEngine, Apex and, on a CPU, CUDA.

Each patch applies when its module is imported, to whichever version that is, and only if the module has the defect.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from isthmus.engine.upstream import compat, cpu_adapter, script_flags
from isthmus.engine.upstream.dataset_helpers import NAME, find_helpers
from isthmus.engine.upstream.import_hooks import patch_on_import, provide_on_import

Say = Callable[[str], None]
_TRITON_KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
_GROUP = re.compile("[A-Z_]+_GROUP(_WITH_CP)?")
_CONVERT_PLUGINS = ("loader_core", "loader_llava", "saver_core", "saver_llava")


def install(platform: str, root: Path, say: Say) -> None:
    """Install all patches; ``root`` is the folder of the checkout, whose code is told that there is a GPU."""
    lacking = script_flags.missing(platform)
    if platform == "cpu":
        cpu_adapter.install()
        cpu_adapter.report_gpu(functools.partial(_is_megatron, f"{root}/"))
        compat.share_gloo_devices()
        patch_on_import("megatron.core.tensor_parallel.random", lambda _: compat.cpu_random_state())
        patch_on_import("megatron.core.transformer.moe.moe_utils", _splits_on_cpu)
        say("cpu: CUDA calls of Megatron-LM run on the CPU, and torch.compile is off")
    if find_spec("triton") is None:
        _without_triton()
    provide_on_import(NAME, lambda folders: find_helpers(folders, say))
    patch_on_import("megatron.core.datasets.utils", _no_build_in_checkout)
    patch_on_import("megatron.legacy.fused_kernels", functools.partial(_no_fused_kernels, say))
    patch_on_import("megatron.core.transformer.moe.moe_utils", functools.partial(_router_without_te, say))
    patch_on_import("megatron.training.arguments", functools.partial(_adapt_arguments, lacking, say))
    patch_on_import("megatron.core.dist_checkpointing.mapping", functools.partial(_numpy_product, say))
    patch_on_import("loader_core", functools.partial(_loader_with_builder, say))
    for name in ("loader_base", "saver_base"):
        patch_on_import(name, functools.partial(_groups_of_one_rank, say))
    if script_flags.TE in lacking:
        patch_on_import("megatron.core.transformer.torch_norm", functools.partial(_norm_on_shards, say))
        patch_on_import("saver_base", functools.partial(_convert_without_te, say))
        for name in _CONVERT_PLUGINS:
            patch_on_import(name, functools.partial(_local_layers, say))


def _is_megatron(root: str, module: dict[str, Any]) -> bool:
    name = str(module.get("__name__"))
    return name in ("__main__", "__mp_main__") or name.startswith("megatron.") or _file(module).startswith(root)


def _file(module: dict[str, Any]) -> str:
    return str(module.get("__file__") or "")


def _without_triton() -> None:
    """megatron-core always imports these kernels, which need Triton, and uses them with --batch-invariant-mode only."""

    def missing(name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    kernels: Any = ModuleType(_TRITON_KERNELS)
    kernels.__getattr__ = missing
    sys.modules[_TRITON_KERNELS] = kernels


def _no_build_in_checkout(utils: Any) -> None:
    """``compile_helpers`` runs make in the checkout, after the helpers have been imported."""
    utils.compile_helpers = lambda: None


def _no_fused_kernels(say: Say, kernels: Any) -> None:
    """``load`` asks nvcc for its version, and compiles nothing since 0.13."""
    kernels.load = lambda args: None
    say("fused kernels: not loaded; Megatron-Core computes the same in PyTorch")


def _router_without_te(say: Say, utils: Any) -> None:
    """megatron-core 0.16 uses this name although it is undefined without TransformerEngine."""
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None
        say("MoE router: te_general_gemm defined as None, a NameError without TransformerEngine")


def _splits_on_cpu(utils: Any) -> None:
    """megatron-core makes NumPy arrays, which all_to_all_single needs as split sizes, of tensors on a GPU only."""

    def as_asked(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    utils.maybe_move_tensor_to_cpu = as_asked


def _adapt_arguments(lacking: set[str], say: Say, arguments: Any) -> None:
    validate = arguments.validate_args

    @functools.wraps(validate)
    def validate_args(args: Any, *rest: Any, **named: Any) -> Any:
        script_flags.adapt(args, lacking, say)
        return validate(args, *rest, **named)

    arguments.validate_args = validate_args


def _numpy_product(say: Say, module: Any) -> None:
    """megatron-core 0.15 calls np.product, which NumPy 2 removed."""
    numpy = getattr(module, "np", None)
    if numpy is not None and not hasattr(numpy, "product"):
        numpy.product = numpy.prod
        say("NumPy: np.product defined as np.prod")


def _norm_on_shards(say: Say, module: Any) -> None:
    """megatron-core refuses torch's norms with sequence parallelism, although it sums the gradients of marked weights."""
    wrapped = module.WrappedTorchNorm
    build = wrapped.__new__

    def build_marked(cls: Any, config: Any, *args: Any, **named: Any) -> Any:
        if not config.sequence_parallel:
            return build(cls, config, *args, **named)
        config.sequence_parallel = False
        try:
            norm = build(cls, config, *args, **named)
        finally:
            config.sequence_parallel = True
        for parameter in norm.parameters():
            parameter.sequence_parallel = True
        return norm

    wrapped.__new__ = build_marked


def _convert_without_te(say: Say, saver: Any) -> None:
    """The savers of tools/checkpoint/convert.py ask for the version of TransformerEngine, for its CPU initialization."""
    version = saver.version
    saver.version = lambda name: "2.0.0" if name == "transformer-engine" else version(name)
    say("convert: the version check of TransformerEngine is skipped")


def _loader_with_builder(say: Say, loader: Any) -> None:
    """``import_model_provider`` of the loader for GPT returns the provider without the builder that it stores."""
    own = loader.MegatronCheckpointLoaderLLM
    find = own.import_model_provider

    @functools.wraps(find)
    def import_model_provider(self: Any) -> Any:
        found = find(self)
        return getattr(self, "model_provider", None) or found

    own.import_model_provider = import_model_provider
    say("convert: the loader gets the model provider with its builder, a TypeError otherwise")


def _groups_of_one_rank(say: Say, base: Any) -> None:
    """tools/checkpoint/convert.py builds models without process groups, and sets only some of those that models ask for."""
    for own in (getattr(base, name, None) for name in ("MegatronCheckpointLoaderBase", "MegatronCheckpointSaverBase")):
        if own is not None:
            own.initialize_megatron_env = _then(own.initialize_megatron_env, _fill_groups)
            say("convert: process groups of one rank for the models that it builds")


def _then(function: Callable[..., Any], after: Callable[[], None]) -> Callable[..., Any]:
    @functools.wraps(function)
    def both(*args: Any, **named: Any) -> Any:
        result = function(*args, **named)
        after()
        return result

    return both


class _PipelineRanks:
    """A process group with the rank and size that the converter sets."""

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
    for name in [name for name, value in groups.items() if value is None and _GROUP.fullmatch(name)]:
        alone = torch.distributed.group.WORLD
        groups[name] = _PipelineRanks() if name == "_PIPELINE_MODEL_PARALLEL_GROUP" else alone


def _local_layers(say: Say, plugin: Any) -> None:
    """The default of ``--loader-transformer-impl`` and ``--saver-transformer-impl`` is TransformerEngine."""
    add = plugin.add_arguments

    def local(value: str) -> str:
        if value == "transformer_engine":
            raise argparse.ArgumentTypeError(
                "TransformerEngine is not installed. Use local, or isthmus convert, which writes both spellings"
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
                    say(f"arguments: {action.option_strings[0]} local, since the default needs TransformerEngine")

    plugin.add_arguments = add_arguments
