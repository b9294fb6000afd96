"""A script for ``isthmus run`` that imports Megatron-LM; not a test.

driver.py logits MEGATRON_LM IDS OUT FLAGS...   loads a model, writes the logits of the tokens in IDS to OUT
driver.py arguments MEGATRON_LM                 prints each argument of its parser as a line of JSON
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any


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
    batch_size, length = tokens.shape
    mask = torch.triu(torch.ones(1, 1, length, length, dtype=torch.bool), diagonal=1)
    positions = torch.arange(length).expand_as(tokens)

    def forward(_data: object, model: Any) -> tuple[Any, Any]:
        model.eval()
        logits = model(tokens, positions, mask)
        return logits, lambda output, non_loss_data: gather_from_tensor_model_parallel_region(output)

    stages = mpu.get_pipeline_model_parallel_world_size()
    with torch.no_grad():
        result = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=[None] * len(chunks),
            model=chunks,
            num_microbatches=stages,  # the minimum for interleaved stages
            seq_length=length,
            micro_batch_size=batch_size,
            forward_only=True,
            collect_non_loss_data=True,
        )
    if mpu.is_pipeline_last_stage() and mpu.get_tensor_model_parallel_rank() == 0:
        torch.save(result[0].float(), out)


def _arguments() -> None:
    import argparse
    import json

    from megatron.training.arguments import add_megatron_arguments

    for action in add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))._actions:
        flags = [flag for flag in action.option_strings if flag.startswith("--")]
        default = getattr(action.default, "name", action.default)
        print(json.dumps({"flags": flags, "name": action.dest, "kind": type(action).__name__, "default": default}))


if __name__ == "__main__":
    command, megatron_lm, *rest = sys.argv[1:]
    sys.path.insert(0, megatron_lm)
    if command == "arguments":
        _arguments()
    else:
        _logits(Path(rest[0]), Path(rest[1]), rest[2:])
