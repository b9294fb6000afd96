"""Rank tasks for tests of context parallelism; see :mod:`ranks.tasks`."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from isthmus.config.schema import ParallelConfig
from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.attention.backends.blocks import plan_stacks
from isthmus.engine.attention.self_attention import CoreAttention
from isthmus.engine.parallel.context_parallel import local_spans, local_tokens
from isthmus.engine.parallel.process_groups import open_groups
from isthmus.platforms.detect import detect
from ranks.live_memory import LiveMemory
from ranks.tasks import start


def attend(*, cases: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Compare context-parallel attention in float64 with attention of one rank over the whole packed sequence.

    Args:
        cases: ``lengths`` of the samples, ``window``, and whether to ``recompute``.

    Returns:
        For each case, the largest difference on any rank of the output and of each gradient, relative to the largest
        absolute value.
    """
    size = dist.get_world_size()
    open_groups(ParallelConfig(cp=size), detect("cpu"), seed=0)
    return [_difference(**case) for case in cases]


def _difference(lengths: list[int], window: int | None, recompute: bool) -> dict[str, float]:
    config = SimpleNamespace(
        attention="blocks",
        attention_dropout=0.0,
        recomputed=frozenset(["core_attn"] if recompute else []),
        params_dtype=torch.float64,
    )
    layer = CoreAttention(config, window=window)
    random = torch.Generator().manual_seed(0)
    tokens, spans = sum(lengths), local_spans(sum(lengths))
    shapes = {"q": (2, 3, 8), "k": (2, 8), "v": (2, 6), "upstream": (36,)}
    full = {name: torch.randn(tokens, *shape, dtype=torch.float64, generator=random) for name, shape in shapes.items()}
    part = {name: local_tokens(tensor, spans) for name, tensor in full.items()}

    def run(inputs_by_name: dict[str, torch.Tensor], batch: PackedBatch) -> list[torch.Tensor]:
        inputs = [inputs_by_name[name].clone().requires_grad_() for name in "qkv"]
        out = layer(*inputs, batch)
        out.backward(inputs_by_name["upstream"])
        return [out.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]

    batch = PackedBatch.for_inference([torch.zeros(length, dtype=torch.int64) for length in lengths])
    got, expected = run(part, replace(batch, spans=spans)), run(full, batch)
    mine = [
        ((ours - local_tokens(theirs, spans)).abs().max() / theirs.abs().max()).item()
        for ours, theirs in zip(got, expected, strict=True)
    ]
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, mine)
    return dict(zip(("out", "q", "k", "v"), map(max, *gathered), strict=True))


def memory_of_a_step(*, model: str, samples: str, lengths: list[int], **layout: Any) -> list[dict[str, int]]:
    """Train on one sample of each length; the tensor bytes of each step on rank 0."""
    training = start(model=model, samples=samples, optim={"lr": 0.0, "min_lr": 0.0}, **layout)
    vocab, measured = training.model.plan.architecture.vocab_size, []
    for length in lengths:
        tokens = torch.randint(0, vocab, (length,), generator=torch.Generator().manual_seed(0))
        batch = PackedBatch(
            input_ids=tokens,
            labels=tokens.roll(-1),
            loss_mask=torch.ones(length, dtype=torch.bool),
            position_ids=torch.arange(length),
            lengths=(length,),
            loss_tokens=(length,),
        )
        plan_stacks.cache_clear()
        with LiveMemory() as memory:
            training.stepper.train_step([batch])
        measured.append({"peak": memory.peak_bytes, "largest": memory.largest_bytes})
    return measured
