"""Runs Megatron-LM, as it was released, on a CPU: the adapter and the mends first, then its own code.

Not a test: ``test_megatron_lm.py`` starts it under torchrun, one process a rank.

    driver.py train MEGATRON_LM FLAGS...            its pretrain_gpt.py
    driver.py logits MEGATRON_LM IDS OUT FLAGS...   its loader and its model; OUT gets the logits of the tokens in IDS
    driver.py arguments MEGATRON_LM                 prints a line of JSON for each argument of its parser
"""

from __future__ import annotations

import importlib.util
import os
import sys
import types
from functools import partial
from pathlib import Path
from typing import Any

from isthmus.engine.upstream import compat, cpu_adapter

_KERNELS = "megatron.core.transformer.custom_layers.batch_invariant_kernels"
"""Imported in every run and used in none of ours; it needs Triton, which a CPU build of torch comes without."""


def _prepare(megatron_lm: str) -> None:
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # its compiler would ask the GPU that is not there for its name
    cpu_adapter.install()
    import torch

    # What it asks before it starts: one GPU of the last but one generation.
    cuda: Any = torch.cuda
    cuda.is_available, cuda.device_count = lambda: True, lambda: 1
    cuda.get_device_properties = lambda *_: types.SimpleNamespace(major=9, minor=0, name="none", total_memory=1 << 36)
    sys.path.append(megatron_lm)
    if importlib.util.find_spec("triton") is None:
        kernels: Any = types.ModuleType(_KERNELS)
        kernels.__getattr__ = lambda name: None
        sys.modules[_KERNELS] = kernels
    compat.cpu_random_state()
    # What it compiles in every run: helpers that the package from PyPI brings compiled, and kernels for CUDA.
    from megatron.core.datasets import utils
    from megatron.legacy import fused_kernels

    builder: Any = utils
    builder.compile_helpers = lambda: None
    kernels_of_old: Any = fused_kernels
    kernels_of_old.load = lambda args: None
    # megatron-core 0.16 without TransformerEngine: the router asks whether this name is None and it is not there.
    from megatron.core.transformer.moe import moe_utils

    module: Any = moe_utils
    module.te_general_gemm = None


def _train(script: str, flags: list[str]) -> None:
    sys.argv = [script, *flags]
    # Not runpy: the processes that the saver spawns import the main module again, and have to find this one.
    exec(compile(Path(script).read_text(), script, "exec"), {"__name__": "__main__", "__file__": script})


def _logits(ids: Path, out: Path, flags: list[str]) -> None:
    import torch

    sys.argv = ["logits", *flags]
    from gpt_builders import gpt_builder
    from megatron.core import mpu
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
    from megatron.training.checkpointing import load_checkpoint
    from megatron.training.initialize import initialize_megatron
    from megatron.training.training import get_model
    from model_provider import model_provider

    initialize_megatron()
    chunks = get_model(partial(model_provider, gpt_builder), ModelType.encoder_or_decoder, wrap_with_ddp=False)
    load_checkpoint(chunks, None, None)
    tokens = torch.load(ids)
    lines, length = tokens.shape
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)
    positions = torch.arange(length).expand_as(tokens)

    def forward(_data: object, model: Any) -> tuple[Any, Any]:
        model.eval()
        logits = model(tokens, positions, mask)
        return logits, lambda output, non_loss_data: gather_from_tensor_model_parallel_region(output)

    stages = mpu.get_pipeline_model_parallel_world_size()
    with torch.no_grad():
        found = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[None] * len(chunks),
            model=chunks,
            num_microbatches=stages,  # as many as interleaved chunks of layers ask for
            seq_length=length,
            micro_batch_size=lines,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0:
        torch.save(found[0].float(), out)


def _arguments() -> None:
    import argparse
    import json

    from megatron.training.arguments import add_megatron_arguments

    for action in add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions:
        flags = [flag for flag in action.option_strings if flag.startswith("--")]
        default = getattr(action.default, "name", action.default)
        print(json.dumps({"flags": flags, "name": action.dest, "kind": type(action).__name__, "default": default}))


if __name__ == "__main__":
    what, megatron_lm, *rest = sys.argv[1:]
    _prepare(megatron_lm)
    if what == "train":
        _train(f"{megatron_lm}/pretrain_gpt.py", rest)
    elif what == "arguments":
        _arguments()
    else:
        _logits(Path(rest[0]), Path(rest[1]), rest[2:])
