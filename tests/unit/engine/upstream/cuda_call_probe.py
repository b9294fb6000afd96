"""Trains, evaluates, saves and resumes a tiny model on the CPU; prints our calls of ``torch.cuda`` as JSON.

Run as a process, because the CPU adapter stays installed.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

from isthmus.config.schema.moe import MoeConfig
from isthmus.config.schema.optim import OptimConfig
from isthmus.config.schema.parallel import ParallelConfig
from isthmus.data.batching.batches import Batches, BatchSettings
from isthmus.data.store.sample_store import SampleStore
from isthmus.engine.parallel.process_groups import open_groups, sum_over_ranks
from isthmus.families.registry import family_for
from isthmus.platforms.detect import detect

CONFIG = {
    "model_type": "mixtral", "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    "num_local_experts": 4, "num_experts_per_tok": 2, "rope_theta": 10000.0, "sliding_window": None,
}  # fmt: skip


def watch(callers: set[str]) -> None:
    """Record the modules of ours that call a function of ``torch.cuda``."""

    def watched(name: str, function: Any) -> Any:
        @functools.wraps(function, updated=())
        def call(*args: Any, **kwargs: Any) -> Any:
            module = sys._getframe(1).f_globals.get("__name__", "")
            if module.startswith("isthmus."):
                callers.add(f"{module} calls torch.cuda.{name}")
            return function(*args, **kwargs)

        return call

    for name, function in list(vars(torch.cuda).items()):
        if isinstance(function, types.FunctionType | types.BuiltinFunctionType) and not name.startswith("_"):
            setattr(torch.cuda, name, watched(name, function))


def main() -> None:
    callers: set[str] = set()
    position = open_groups(ParallelConfig(), detect("cpu"), seed=0)
    from isthmus.engine.checkpoint import run_state, save_load
    from isthmus.engine.checkpoint.checkpoint_writer import SaveOptions
    from isthmus.engine.decoder.decoder import build_stages
    from isthmus.engine.decoder.model_config import transformer_config
    from isthmus.engine.optim.learning_rate import build_schedule
    from isthmus.engine.optim.optimizer import build_optimizer, wrap_data_parallel
    from isthmus.engine.step import Stepper

    watch(callers)
    torch.cuda.current_device()
    architecture = family_for(CONFIG).to_architecture(CONFIG)
    moe = MoeConfig(aux_loss=0.01)
    (model,) = build_stages(architecture, transformer_config(architecture, dtype=torch.float32, moe=moe))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.05)
    optim = OptimConfig(lr=1e-3)
    stages = [wrap_data_parallel(model)]
    optimizer = build_optimizer(stages, optim)
    stepper = Stepper(stages, optimizer, build_schedule(optimizer, optim, 4))
    samples = [(list(range(1, length)), [0] + [1] * (length - 2)) for length in (5, 9, 7, 12)]
    settings = BatchSettings(seq_length=16, micro_batch_size=1, global_batch_size=2, packing=True)
    batches = Batches(SampleStore.from_samples(samples), settings)
    stepper.train_step(batches.step(0))
    stepper.evaluate(batches.eval_batches())
    sum_over_ranks([1.0], stepper.device)
    with tempfile.TemporaryDirectory() as folder:
        progress = run_state.Progress(step=1, data="these samples")
        saved = save_load.save(Path(folder), stepper, progress, ParallelConfig(), SaveOptions(keep=1))
        save_load.load(saved, stepper, ParallelConfig())
    print(json.dumps({"rank": position.rank, "callers": sorted(callers)}))


if __name__ == "__main__":
    main()
