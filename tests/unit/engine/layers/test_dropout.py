"""Masks of dropout: their rate, their independence, and what they depend on."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.attention.backends.sdpa import sdpa_attention
from isthmus.engine.decoder.single_process_model import single_process_groups
from isthmus.engine.layers.dropout import (
    ATTENTION_OUTPUT,
    MLP_OUTPUT,
    AttentionDropout,
    dropout_keys,
    hidden_dropout,
)


def batch_of(samples: dict[int, int], *, step: int = 5, seed: int = 0, padding: int = 0) -> PackedBatch:
    """A batch of samples with these ids and lengths."""
    lengths = [*samples.values(), *([padding] if padding else [])]
    batch = PackedBatch.for_inference([torch.zeros(length, dtype=torch.int64) for length in lengths])
    batch = replace(batch, sample_ids=tuple(samples), padding=padding)
    return replace(batch, dropout=dropout_keys(batch, seed=seed, step=step))


def mask(batch: PackedBatch, rate: float = 0.1, width: int = 64, layer: int = 3, place: int = MLP_OUTPUT) -> Tensor:
    """[T, H], True where a value is kept."""
    ones = torch.ones(sum(batch.lengths), 1, width, requires_grad=True)
    dropped = hidden_dropout(ones, batch, rate, layer=layer, place=place)
    dropped.sum().backward()
    assert torch.equal(ones.grad, dropped.detach())  # the backward pass has the same mask and scale
    assert torch.equal(dropped, (dropped > 0) * torch.tensor(1.0).mul(1 / (1 - rate)))
    return dropped[:, 0] > 0


@pytest.mark.slow_cases("0.001", "0.1")
@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_rate(rate: float) -> None:
    remaining = mask(batch_of({0: 4096}), rate, width=1024)
    deviation = (rate * (1 - rate) / remaining.numel()) ** 0.5
    assert abs(1 - remaining.double().mean().item() - rate) < 5 * deviation


@pytest.mark.slow
def test_values_are_independent() -> None:
    """The counts of kept pairs of values at any distance, and of rows and columns, have the variance of chance."""
    rate, tokens, width = 0.3, 2048, 1024
    remaining = mask(batch_of({4: tokens}), rate, width).double() - (1 - rate)
    variance = rate * (1 - rate)
    for axis, number in ((0, tokens), (1, width)):
        sums = remaining.sum(axis) / (variance * number) ** 0.5
        assert 0.85 < sums.square().mean().item() < 1.15 and sums.abs().max() < 5
    for rows, columns in ((0, 1), (1, 0), (1, 1), (0, 2), (2, 0), (0, 512), (1024, 0), (7, 13)):
        product = (remaining * remaining.roll((rows, columns), (0, 1))).mean().item() / variance
        assert abs(product) < 5 / (tokens * width) ** 0.5, (rows, columns)
    correlations = (remaining[:256] @ remaining[:256].T).fill_diagonal_(0) / (variance * width**0.5)
    assert 0.95 < correlations.square().sum().item() / (256 * 255) < 1.05 and correlations.abs().max() < 6


def test_mask_of_a_token_depends_on_its_sample_and_position() -> None:
    alone, packed = mask(batch_of({7: 6})), mask(batch_of({2: 3, 7: 6, 1: 2}, padding=3))
    assert torch.equal(packed[3:9], alone)
    split = batch_of({7: 6})
    documents = replace(split, lengths=(2, 4), sample_ids=(7, 7))
    documents = replace(documents, dropout=dropout_keys(documents, seed=0, step=5))
    assert torch.equal(mask(documents), alone)


def test_other_steps_seeds_places_and_samples_have_other_masks() -> None:
    masks = [
        mask(batch_of({7: 64})),
        mask(batch_of({7: 64}, step=6)),
        mask(batch_of({7: 64}, seed=1)),
        mask(batch_of({8: 64})),
        mask(batch_of({7: 64}), layer=4),
        mask(batch_of({7: 64}), place=ATTENTION_OUTPUT),
    ]
    for number, entry in enumerate(masks):
        for other in masks[number + 1 :]:
            both = (entry == other).double().mean().item()  # 0.9 * 0.9 + 0.1 * 0.1 by chance
            assert 0.79 < both < 0.85


def test_a_batch_without_keys_is_refused() -> None:
    batch = PackedBatch.for_inference([torch.zeros(4, dtype=torch.int64)])
    with pytest.raises(ValueError, match=r"needs PackedBatch\.dropout, got None; set it to .*dropout_keys"):
        hidden_dropout(torch.ones(4, 1, 8), batch, 0.1, layer=1, place=MLP_OUTPUT)
    unchanged = torch.ones(4, 1, 8)
    assert hidden_dropout(unchanged, batch, 0.0, layer=1, place=MLP_OUTPUT) is unchanged


@pytest.mark.slow
def test_kernels_draw_the_same_masks_for_the_same_key() -> None:
    """Of the GPU's attention kernels, with the generator of the CPU in place of the GPU's."""
    q, k, v = torch.ones(32, 2, 2, 8), torch.ones(32, 2, 8), torch.ones(32, 2, 8)  # the output is the sum of weights
    with single_process_groups():

        def attended(step: int, layer: int = 1) -> Tensor:
            dropout = AttentionDropout(0.25, layer, 0, batch_of({3: 20, 5: 12}, step=step))
            return sdpa_attention(q, k, v, (20, 12), dropout=dropout)[..., 0]

        first, torch_state = attended(1), torch.rand(1)
        assert torch.equal(attended(1), first) and torch.equal(torch.rand(1), torch_state)
        assert not torch.equal(attended(2), first) and not torch.equal(attended(1, layer=2), first)
        means = torch.stack([attended(step) for step in range(200)]).mean(0)
        assert (means - 1).abs().max() < 0.2 and first.std() > 0.05
