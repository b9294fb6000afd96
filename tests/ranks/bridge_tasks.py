"""Tasks that use :class:`isthmus.AutoBridge`, and the examples in examples/python."""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.tensor.debug import CommDebugMode

import isthmus
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.layers.dropout import dropout_keys
from isthmus.engine.parallel import sharded_params
from isthmus.recipes.model.bridge_modules import provide_bridge
from ranks.live_memory import LiveMemory
from ranks.tiny import VOCAB

EXAMPLES = Path(__file__).resolve().parents[2] / "examples/python"


def run_example(*, name: str, args: list[str]) -> list[float]:
    """Run an example; returns its losses, if it has any."""
    with mock.patch.object(sys, "argv", [name, *args]):
        result: list[float] = runpy.run_path(str(EXAMPLES / name)).get("losses", [])
    return result


def run_program_of_bridge(*, model: str, folder: str) -> float:
    """A program for Megatron Bridge: an export, and pretraining from the weights of a model; returns the last loss."""
    provide_bridge()
    llama32: Any = importlib.import_module("megatron.bridge.recipes.llama.llama32_1b")
    bridge = importlib.import_module("megatron.bridge").AutoBridge.from_hf_pretrained(model, trust_remote_code=True)
    provider = bridge.to_megatron_provider()
    provider.tensor_model_parallel_size = 1
    provider.pipeline_model_parallel_size = 1
    provider.finalize()
    bridge.save_hf_pretrained(provider.provide_distributed_model(wrap_with_ddp=False), f"{folder}/exported")
    config = llama32.pretrain_config(train_iters=2, global_batch_size=2, seq_length=32, dir=f"{folder}/run")
    config.model = bridge.to_megatron_provider()
    result: float = isthmus.pretrain(config).loss
    return result


def train_plainly(*, model: str, destination: str, **parallel: Any) -> None:
    """Two steps of SGD with PyTorch's optimizer, beside a reference model of the same layout.

    The number of tokens is even, for sequence parallelism.
    """
    bridge = isthmus.AutoBridge.from_hf_pretrained(model)
    (live,) = bridge.to_megatron_model(parallel)
    generator = torch.Generator().manual_seed(0)
    batch = PackedBatch.for_training([torch.randint(VOCAB, (length,), generator=generator) for length in (9, 14, 4)])
    assert batch.loss_mask is not None and batch.input_ids.numel() % 2 == 0
    reference = isthmus.load_model(model, parallel)
    with torch.no_grad():
        before = reference(batch)
        assert torch.equal(before, live.eval()(batch))
    optimizer = torch.optim.SGD(live.parameters(), lr=0.1)
    live.train()
    for step in range(2):
        if live.config.is_random:
            batch = replace(batch, dropout=dropout_keys(batch, seed=0, step=step))
        loss = live(batch, loss_positions=batch.loss_mask.nonzero()[:, 0]) / batch.num_loss_tokens
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        assert torch.equal(reference(batch), before) and not torch.equal(live.eval()(batch), before)
    bridge.save_hf_pretrained(live, destination)


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """The bytes that this rank receives in each collective of tensors."""
    counts: list[int] = []

    def counted(collective: Any, received: Callable[..., int]) -> Any:
        def call(*tensors: Any, **options: Any) -> Any:
            counts.append(received(*tensors, **options))
            return collective(*tensors, **options)

        return call

    kinds: dict[str, Callable[..., int]] = {
        "all_gather_into_tensor": lambda output, part, **_: output.nbytes - part.nbytes,
        "broadcast": lambda tensor, src, **_: 0 if src == dist.get_rank() else tensor.nbytes,
        "all_to_all_single": lambda output, *_, **__: output.nbytes,
    }
    with ExitStack() as stack:
        for name, received in kinds.items():
            stack.enter_context(mock.patch.object(dist, name, counted(getattr(dist, name), received)))
        yield counts


def export_weights(
    *, model: str, rank0_only: bool = False, dtype: str | None = None, bucket_bytes: int, **parallel: Any
) -> list[dict[str, Any]]:
    """Compare all exported tensors with the file, bit by bit, and count collectives; one result per rank."""
    expected_values = load_file(f"{model}/model.safetensors")
    bridge = isthmus.AutoBridge.from_hf_pretrained(model)
    live = bridge.to_megatron_model(parallel)
    chosen = None if dtype is None else getattr(torch, dtype)
    names, different = [], []
    with (
        LiveMemory() as memory,
        CommDebugMode() as communication,
        counted_bytes() as received,
        mock.patch.object(sharded_params, "BUCKET_BYTES", bucket_bytes),
    ):
        for name, tensor in bridge.export_weights(live, dtype=chosen, rank0_only=rank0_only):
            names.append(name)
            expected = expected_values[name] if chosen is None else expected_values[name].to(chosen)
            same = tensor.dtype == expected.dtype and tensor.shape == expected.shape
            if not same or not torch.equal(tensor.view(torch.uint8), expected.view(torch.uint8)):
                different.append(name)
    total = sum(tensor.nbytes for tensor in expected_values.values())
    collectives = {str(kind).rpartition(".")[2]: count for kind, count in communication.get_comm_counts().items()}
    result = {"names": sorted(names), "different": different, "peak": memory.peak_bytes / total}
    result["objects"] = collectives.pop("allgather_", 0)  # names of the tensors of each rank
    result["collectives"], result["received"] = collectives, sum(received) / total
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, result)
    return gathered


def provider_round_trip(*, model: str, destination: str, tp: int, pp: int) -> list[str]:
    """The calls of Megatron Bridge, in its order; returns the error of a layout that does not fit."""
    bridge = isthmus.AutoBridge.from_hf_pretrained(model, trust_remote_code=True)
    provider = bridge.to_megatron_provider()
    provider.tensor_model_parallel_size = 3
    try:
        provider.finalize()
    except Exception as error:
        refused = [type(error).__name__, str(error)]
    provider.tensor_model_parallel_size = tp
    provider.pipeline_model_parallel_size = pp
    provider.finalize()
    megatron_model = provider.provide_distributed_model(wrap_with_ddp=False)
    bridge.save_hf_pretrained(megatron_model, destination)
    return refused
