"""Rank tasks for tests of Mamba's mixers; see :mod:`ranks.tasks`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.mixers import mamba_kernels
from isthmus.families.registry import family_for
from isthmus.families.rules.shard import Layout, owned_slices
from isthmus.hf.model_folder import ModelFolder
from isthmus.recipes.model.load_model import load_model
from ranks.fake_mamba_kernels import install
from ranks.tiny import VOCAB


def save_float64(*, model: str, lengths: list[int], file: str, **layout: Any) -> None:
    """Save logits and canonical gradients, computed in float64, of samples of these lengths."""
    result = _computed(model, lengths, layout)
    if dist.get_rank() == 0:
        torch.save(result, file)


def differences_from_float64(*, model: str, lengths: list[int], file: str, **layout: Any) -> dict[str, float]:
    """Largest differences from :func:`save_float64`, relative to the largest value of each tensor."""
    result, expected = _computed(model, lengths, layout), torch.load(file)
    assert result.keys() == expected.keys()
    return {name: float((result[name] - expected[name]).abs().max() / expected[name].abs().max()) for name in expected}


def _computed(model: str, lengths: list[int], layout: dict[str, Any]) -> dict[str, Tensor]:
    """Logits and, on all ranks, whole gradients by canonical name."""
    decoder = load_model(model, layout).double().train()
    random = torch.Generator().manual_seed(0)
    batch = PackedBatch.for_inference([torch.randint(0, VOCAB, (length,), generator=random) for length in lengths])
    logits = decoder(replace(batch))
    assert logits.dtype == torch.float64
    logits.backward(torch.randn(logits.shape, generator=random, dtype=torch.float64))
    gradients = {}
    for name, parameter in decoder.named_parameters():
        assert parameter.grad is not None and parameter.grad.dtype == torch.float64, name
        if getattr(parameter, "sequence_parallel", False):
            dist.all_reduce(parameter.grad)
        gradients[name] = parameter.grad
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, gradients)
    return {"logits": logits.detach(), **_whole(model, decoder.architecture, gathered)}


def _whole(model: str, arch: Any, gathered: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Whole canonical tensors from those of all tensor-parallel ranks."""
    placements, ranks = family_for(ModelFolder.open(model).config).placements(arch), len(gathered)
    padded = gathered[0]["embedding.word_embeddings.weight"].size(0) * ranks
    values = {}
    for name in gathered[0]:
        rule = placements[name].rule
        complete = torch.full(rule.canonical_shape(arch), torch.nan, dtype=torch.float64)
        for rank, gradients in enumerate(gathered):
            layout = Layout(tp_rank=rank, tp_size=ranks, etp_size=ranks, etp_rank=rank, padded_vocab_size=padded)
            for owned, local in owned_slices(rule, arch, layout):
                complete[owned] = gradients[name][local]
        values[name] = complete
    return values


def with_kernels(*, model: str, lengths: list[int], **layout: Any) -> dict[str, Any]:
    """The largest difference of bf16 logits, relative to the largest one, and of a gradient if kernels are used.

    The kernels are in plain PyTorch, with the signatures of the real ones; returns the names of those used.
    """
    decoder = load_model(model, layout, precision="bf16")
    random = torch.Generator().manual_seed(0)
    batch = PackedBatch.for_inference([torch.randint(0, VOCAB, (length,), generator=random) for length in lengths])

    def run() -> list[Tensor]:
        logits = decoder(batch).float()
        return [logits.detach(), *torch.autograd.grad(logits.square().sum(), decoder.embedding.word_embeddings.weight)]

    expected = run()
    with pytest.MonkeyPatch.context() as patch:
        called = install(patch)
        patch.setattr(mamba_kernels, "_on_gpu", lambda _: True)
        messages = mamba_kernels.choose_mamba_kernels(decoder)
        called.clear()
        result = run()
    differences = [
        float((mine - theirs).abs().max().float() / theirs.abs().max().float())
        for mine, theirs in zip(result, expected, strict=True)
    ]
    return {"messages": messages, "called": sorted({*called}), "difference": max(differences)}
