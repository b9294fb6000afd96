"""Noise on embeddings: its magnitude, and what it depends on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.decoder.neftune import with_noise
from isthmus.engine.decoder.single_process_model import single_process_groups
from isthmus.engine.layers.dropout import dropout_keys

WIDTH = 64


def noise(samples: dict[int, int], *, alpha: float = 5.0, layer: int = 0, padding: int = 0, **keys: Any) -> Tensor:
    """[T, H] for samples with these ids and lengths."""
    lengths = [*samples.values(), *([padding] if padding else [])]
    batch = PackedBatch.for_inference([torch.zeros(length, dtype=torch.int64) for length in lengths])
    batch = replace(batch, sample_ids=tuple(samples), padding=padding)
    batch = replace(batch, dropout=dropout_keys(batch, **{"seed": 0, "step": 5} | keys))
    return with_noise(torch.zeros(sum(lengths), 1, WIDTH), batch, alpha, layer=layer)[:, 0]


def test_magnitude_is_that_of_the_length_of_each_sample() -> None:
    """Uniform in (-m, m) with m = alpha / sqrt(L * H), as in the paper for a sequence of L tokens without padding."""
    lengths = {3: 400, 1: 100, 8: 900}
    result = noise(lengths, padding=20)[:1400].split([*lengths.values()])
    for length, part in zip(lengths.values(), result, strict=True):
        scaled = part.double() * (length * WIDTH) ** 0.5 / 5
        assert 0.999 < scaled.abs().max().item() <= 1
        deviation = scaled.numel() ** -0.5
        assert abs(scaled.mean().item()) < 5 * deviation * 3**-0.5
        assert abs(scaled.square().mean().item() - 1 / 3) < 5 * deviation * (4 / 45) ** 0.5
        neighbours = (scaled[1:] * scaled[:-1]).mean(), (scaled[:, 1:] * scaled[:, :-1]).mean()
        assert max(value.abs().item() for value in neighbours) < 5 * deviation / 3 * 1.1


def test_noise_of_a_token_depends_on_its_sample_and_position() -> None:
    alone = noise({7: 6})
    assert torch.equal(noise({2: 3, 7: 6, 1: 2}, padding=3)[3:9], alone)
    for other in (noise({7: 6}, step=6), noise({7: 6}, seed=1), noise({8: 6}), noise({7: 6}, layer=3)):
        assert (other == alone).double().mean() < 0.01


def test_rows_of_a_rank_are_those_of_the_whole_sequence() -> None:
    batch = PackedBatch.for_inference([torch.zeros(8, dtype=torch.int64)] * 2)
    batch = replace(batch, sample_ids=(0, 1))
    batch = replace(batch, dropout=dropout_keys(batch, seed=0, step=0))
    with single_process_groups():
        full = with_noise(torch.zeros(16, 1, 4), batch, 1.0, layer=0)
        share = with_noise(torch.zeros(8, 1, 4), batch, 1.0, layer=0)  # sequence parallelism of 2
        split = replace(batch, spans=((0, 4), (12, 16)))  # context parallelism of 2
        zigzag = with_noise(torch.zeros(8, 1, 4), split, 1.0, layer=0)
    assert torch.equal(share, full[:8]) and torch.equal(zigzag, torch.cat([full[:4], full[12:]]))


def test_gradients_pass_and_nothing_happens_without_alpha() -> None:
    batch = replace(PackedBatch.for_inference([torch.zeros(4, dtype=torch.int64)]), sample_ids=(0,))
    x = torch.ones(4, 1, 8, requires_grad=True)
    assert with_noise(x, batch, 0.0, layer=0) is x
    with pytest.raises(ValueError, match="with dropout or noise in training mode needs"):
        with_noise(x, batch, 1.0, layer=0)
    keyed = replace(batch, dropout=dropout_keys(batch, seed=0, step=0))
    with_noise(x.bfloat16(), keyed, 1.0, layer=0).sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 1, 8))
