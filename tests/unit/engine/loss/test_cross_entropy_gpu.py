"""The loss of a GPU, compiled for this CPU: the eager values, without compiling again for each length."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import metrics

from isthmus.engine.compiled import compiled_versions, set_compile
from isthmus.engine.loss import cross_entropy_cpu
from isthmus.engine.loss.cross_entropy_cpu import Smoothing
from isthmus.engine.loss.cross_entropy_gpu import (
    CHUNK_ELEMENTS,
    chunk_losses,
    elements_for,
    new_buffer,
    row_statistics,
)

VOCAB = 300


@pytest.fixture
def compiled_for_cpu() -> Iterator[None]:
    set_compile(True, device="cpu")
    compiled_versions.clear()
    metrics.reset()
    yield
    set_compile(False)


def drawn(tokens: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    logits = new_buffer(tokens, VOCAB, like=torch.empty(0, dtype=torch.bfloat16))
    logits.copy_(torch.randn(tokens, VOCAB, generator=generator) * 5)
    return logits, torch.randint(0, VOCAB, (tokens,), generator=generator)


@pytest.mark.thorough
@pytest.mark.processes  # the C++ compiler
@torch.no_grad()
def test_compiled_losses_and_gradients(compiled_for_cpu: None) -> None:
    for tokens in (9, 24):
        logits, targets = drawn(tokens)
        expected = logits.clone()
        expected_values = cross_entropy_cpu.chunk_losses(expected, targets, None, None, None, gradient=True)
        result = chunk_losses(logits, targets, None, None, None, gradient=True)
        assert (result - expected_values).abs().max() < 1e-5
        assert (logits.float() - expected.float()).abs().max() < 2**-8
    # The two regions, for both lengths.
    assert compiled_versions.total() == 2
    assert metrics.generated_kernel_count <= 8


@pytest.mark.parametrize("softcap", [None, 4.0])
@pytest.mark.parametrize("smoothing", [None, Smoothing(0.1, 0.1 / VOCAB)], ids=["plain", "smoothed"])
def test_shards_of_the_vocabulary(
    softcap: float | None, smoothing: Smoothing | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks with 130 and 170 columns compute the losses and the gradient of one rank."""
    logits, targets = drawn(24)
    logits, scale = logits.float(), torch.linspace(0.5, 2, 24)[:, None]
    shards, offsets = [part.clone() for part in logits.split((130, 170), 1)], (0, 130)
    statistics = [
        row_statistics(item, targets - start, softcap, smoothing is not None)[0]
        for item, start in zip(shards, offsets, strict=True)
    ]
    expected = chunk_losses(logits, targets, None, scale, softcap, gradient=True, smoothing=smoothing)

    def gather(out: Tensor, local: Tensor, group: Any) -> None:
        assert any(torch.equal(local, item) for item in statistics)
        out.copy_(torch.cat(statistics))

    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)
    group: Any = SimpleNamespace(size=lambda: 2)
    for shard, start in zip(shards, offsets, strict=True):
        result = chunk_losses(shard, targets - start, group, scale, softcap, gradient=True, smoothing=smoothing)
        assert torch.allclose(result, expected, rtol=1e-6)
    assert torch.allclose(torch.cat(shards, 1), logits, rtol=1e-5, atol=1e-7)


def test_evaluation_keeps_the_logits() -> None:
    logits, targets = drawn(9)
    before = logits.clone()
    expected = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    result = chunk_losses(logits, targets, None, None, None, gradient=False)
    assert (result - expected).abs().max() < 1e-5 and torch.equal(logits, before)


def test_rows_are_aligned_and_chunks_suit_the_memory() -> None:
    assert drawn(9)[0].stride() == (320, 1)
    assert elements_for(80 << 30) == CHUNK_ELEMENTS == elements_for(79 << 30)
    assert elements_for(24 << 30) == CHUNK_ELEMENTS // 2 and elements_for(0) == 1 << 20
