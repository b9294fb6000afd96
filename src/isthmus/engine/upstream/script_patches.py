"""Patches with which unmodified scripts of Megatron-LM run without TransformerEngine, Apex and, on a CPU, CUDA.

Each patch applies when its module is imported, to whichever version that is, and only if the module has the defect.
"""

from __future__ import annotations

import faulthandler
import functools
import signal
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from isthmus.engine.local_store import replace_env_rendezvous
from isthmus.engine.upstream import (
    checkpoint_saver,
    compat,
    converter_patches,
    cpu_adapter,
    legacy_checkpoint,
    packed_samples,
    script_flags,
)
from isthmus.engine.upstream.dataset_helpers import NAME, find_helpers
from isthmus.engine.upstream.import_hooks import patch_on_import, provide_on_import

Say = Callable[[str], None]
_TRITON_KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"


def install(platform: str, root: Path, say: Say) -> None:
    """Install all patches; ``root`` is the checkout, whose code sees ``torch.cuda.is_available()`` as true."""
    lacking = script_flags.missing(platform)
    replace_env_rendezvous()
    if platform == "cpu":
        cpu_adapter.install()
        cpu_adapter.report_gpu(functools.partial(_is_megatron, f"{root}/"))
        compat.share_gloo_devices()
        patch_on_import("megatron.core.tensor_parallel.random", lambda _: compat.cpu_random_state())
        patch_on_import("megatron.core.transformer.moe.moe_utils", _splits_on_cpu)
        say("CPU adapter: CUDA calls of the script and of megatron run on the CPU")
    if find_spec("triton") is None:
        _without_triton()
    provide_on_import(NAME, lambda folders: find_helpers(folders, say))
    patch_on_import("megatron.core.datasets.utils", _no_build_in_checkout)
    patch_on_import("megatron.legacy.fused_kernels", functools.partial(_no_fused_kernels, say))
    patch_on_import("megatron.core.transformer.moe.moe_utils", functools.partial(_router_without_te, say))
    patch_on_import("megatron.core.inference.data_parallel_inference_coordinator", _without_stack_traces)
    patch_on_import("megatron.training.arguments", functools.partial(_adapt_arguments, lacking, say))
    patch_on_import("megatron.core.dist_checkpointing.mapping", functools.partial(_numpy_product, say))
    patch_on_import(checkpoint_saver.MODULE, lambda module: checkpoint_saver.patch_module(module, say))
    legacy_checkpoint.install(say)
    if script_flags.TE in lacking:
        patch_on_import("megatron.core.transformer.torch_norm", _norm_on_shards)
    packed_samples.install(without_te=script_flags.TE in lacking)
    converter_patches.install(say, without_te=script_flags.TE in lacking)


def alone_instead_of_nccl() -> None:
    """For a spawned process on a CPU: ROCm's fork calls ``init_process_group("nccl")`` in the process that writes a
    checkpoint, and there is no NCCL. It has a group of its own, as it uses no collective.
    """
    initialize = torch.distributed.init_process_group

    @functools.wraps(initialize)
    def init_process_group(backend: str | None = None, *args: Any, **options: Any) -> None:
        if backend == "nccl":
            initialize("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        else:
            initialize(backend, *args, **options)

    torch.distributed.init_process_group = init_process_group


def _is_megatron(root: str, module: dict[str, Any]) -> bool:
    name, file = str(module.get("__name__")), str(module.get("__file__") or "")
    in_checkout = file.startswith(root) and "site-packages" not in file  # a virtual environment in the checkout
    return in_checkout or name in ("__main__", "__mp_main__") or name.startswith("megatron.")


def _without_triton() -> None:
    """megatron-core always imports these kernels, which need Triton, and uses them with --batch-invariant-mode."""

    def unused(name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    kernels: Any = ModuleType(_TRITON_KERNELS)
    kernels.__getattr__ = unused
    sys.modules[_TRITON_KERNELS] = kernels


def _no_build_in_checkout(utils: Any) -> None:
    """``compile_helpers`` runs make in the checkout, after the helpers have been imported."""
    utils.compile_helpers = lambda: None


def _no_fused_kernels(say: Say, kernels: Any) -> None:
    """``load`` asks nvcc for its version, and then compiles nothing."""
    kernels.load = lambda args: None
    say("fused kernels: not loaded, which needs nvcc; Megatron-Core computes the same in PyTorch")


def _without_stack_traces(_: Any) -> None:
    """The module asks for a stack trace at SIGTERM and SIGINT, with which the processes of a successful run end too."""
    for number in (signal.SIGTERM, signal.SIGINT):
        faulthandler.unregister(number)


def _router_without_te(say: Say, utils: Any) -> None:
    """megatron-core 0.16 uses this name although it is undefined without TransformerEngine."""
    if not hasattr(utils, "te_general_gemm"):
        utils.te_general_gemm = None
        say("MoE router: te_general_gemm is None, which is a NameError without TransformerEngine")


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
        if script_flags.TE in lacking:
            packed_samples.check(args, say)
        return validate(args, *rest, **named)

    arguments.validate_args = validate_args


def _numpy_product(say: Say, module: Any) -> None:
    """megatron-core 0.15 calls np.product, which NumPy 2 removed."""
    numpy = getattr(module, "np", None)
    if numpy is not None and not hasattr(numpy, "product"):
        numpy.product = numpy.prod
        say("NumPy: np.product is np.prod, since NumPy 2 has removed it")


def _norm_on_shards(module: Any) -> None:
    """megatron-core refuses torch's norms with sequence parallelism. It adds up the gradients of marked weights."""
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
