"""Gradients of whole models in float64: rounding cannot hide a sum over ranks that is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from safetensors.torch import load_file, save_file
from torch import Tensor

from isthmus.convert.gathered_weights import full_weights
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.data.batching.shared_prefixes import find_shared_prefixes
from isthmus.engine.parallel.ddp import sum_tp_grads
from isthmus.engine.parallel.live_parameters import live_parameters
from isthmus.recipes.model import rank_model
from isthmus.recipes.model.load_model import build_from_folder


def gradients(*, model: str, saved: str, vocab_size: int, lengths: list[int], **layout: int) -> dict[str, float]:
    """Gradients of all tensors in float64, in a layout of all ranks.

    Without file ``saved`` they are saved there. Otherwise returns the largest difference of each tensor from that file,
    relative to its largest value, and under ``replicas`` that of tensors that all ranks have.
    """
    with patch.dict(rank_model.DTYPES, {"fp32": torch.float64}):
        built = build_from_folder(model, layout)
    (stage,) = built.stages
    random = torch.Generator().manual_seed(5)
    samples = [torch.randint(vocab_size, (length,), generator=random) for length in lengths]
    sum_tp_grads(stage)
    logits = stage.train()(PackedBatch.for_inference(samples))  # losses are float32
    logits.backward(torch.randn(logits.shape, dtype=logits.dtype, generator=random))
    live = {name: parameter for name, parameter in live_parameters(built.stages).items() if parameter.requires_grad}
    local_gradients = {name: parameter.grad for name, parameter in live.items() if parameter.grad is not None}
    assert local_gradients.keys() == live.keys()
    replicas = max(_spread(local_gradients[name]) for name, parameter in live.items() if _is_replicated(parameter))
    plan = built.plan
    full = dict(
        full_weights(
            local_gradients,
            plan.family,
            plan.architecture,
            torch.float64,
            layout=built.layout,
            device=torch.device("cpu"),
        )
    )
    if not Path(saved).exists():
        save_file(full, saved)
        return {"replicas": replicas}
    expected = load_file(saved)
    assert full.keys() == expected.keys()
    return {"replicas": replicas} | {name: _difference(full[name], expected[name]) for name in full}


def _difference(ours: Tensor, theirs: Tensor) -> float:
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def _is_replicated(parameter: Tensor) -> bool:
    return not getattr(parameter, "tensor_model_parallel", False)


def _spread(gradient: Tensor) -> float:
    """Difference of replicas on tensor-parallel ranks."""
    group = parallel_state.get_tensor_model_parallel_group()
    first = gradient.clone()
    dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
    worst = torch.tensor(_difference(gradient, first))
    dist.all_reduce(worst, dist.ReduceOp.MAX, group=group)
    return worst.item()


def prefix_differences(*, model: str, vocab_size: int, lengths: list[int], prefix: int, **layout: int) -> list[float]:
    """Logits, hidden rows and gradients with shared prefixes, against those without, in float64.

    Returns the largest relative differences of logits and of gradients, and the share of rows that is computed.
    """
    with patch.dict(rank_model.DTYPES, {"fp32": torch.float64}):
        built = build_from_folder(model, layout)
    (stage,) = built.stages
    random = torch.Generator().manual_seed(5)
    prompts = [torch.randint(vocab_size, (prefix,), generator=random) for _ in range(2)]
    answers = [torch.randint(vocab_size, (length,), generator=random) for length in lengths]
    batch = PackedBatch.for_inference([torch.cat((prompts[k % 3 // 2], answer)) for k, answer in enumerate(answers)])
    tp = parallel_state.get_tensor_model_parallel_world_size()
    arrays = [sample.numpy() for sample in batch.input_ids.split(batch.lengths)]
    total = batch.input_ids.numel()
    shared = replace(batch, shared=find_shared_prefixes(arrays, total, tp))
    sum_tp_grads(stage)
    results = []
    for inputs in (batch, shared):
        logits = stage.train()(inputs)
        logits.backward(torch.linspace(-1, 1, logits.numel(), dtype=logits.dtype).view_as(logits).sin())
        parameters = live_parameters(built.stages).values()
        results.append((logits.detach(), [x.grad for x in parameters if x.grad is not None]))
        stage.zero_grad(set_to_none=True)
    (expected, expected_grads), (logits, grads) = results
    gradients = max(_difference(ours, theirs) for ours, theirs in zip(grads, expected_grads, strict=True))
    return [_difference(logits, expected), gradients, shared.num_rows / total]
