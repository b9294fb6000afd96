"""Attention to selected keys equals dense attention with their mask, and saves no scores."""

from __future__ import annotations

import pytest
import torch

from isthmus.engine.attention import sparse_attention as module
from isthmus.engine.attention.backends.blocks import packed_attention
from isthmus.engine.attention.sparse_attention import sparse_attention

LENGTHS = (37, 1, 20)
SCALE = 0.3


def inputs() -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    shapes = ((58, 3, 1, 8), (58, 3, 8), (58, 3, 6))
    return [torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_() for shape in shapes]


def selection(width: int) -> list[torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.rand(length, length, generator=random).argsort()[:, :width].int() for length in LENGTHS]


def masked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chosen: list[torch.Tensor]) -> torch.Tensor:
    out = []
    for own_q, own_k, own_v, keys in zip(*(item.split(LENGTHS) for item in (q[:, :, 0], k, v)), chosen, strict=True):
        seen = torch.zeros(len(own_k), len(own_k), dtype=torch.bool).scatter_(1, keys.long(), True).tril()
        scores = torch.einsum("qhd,khd->hqk", own_q, own_k).mul(SCALE).masked_fill(~seen, -torch.inf)
        out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), own_v))
    return torch.cat(out).flatten(1)


@pytest.mark.parametrize("block", [8, 256])
def test_output_and_gradients_are_those_of_a_mask(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BLOCK_QUERIES", block)
    chosen = [torch.cat((keys, torch.arange(len(keys))[:, None].int()), 1) for keys in selection(5)]
    tensors, others = inputs(), inputs()
    ours, theirs = sparse_attention(*tensors, LENGTHS, chosen, SCALE), masked(*others, chosen)
    upstream = torch.randn_like(ours)
    ours.backward(upstream)
    theirs.backward(upstream)
    assert torch.allclose(ours, theirs)
    assert all(torch.allclose(mine.grad, other.grad) for mine, other in zip(tensors, others, strict=True))


def test_all_keys_are_dense_attention() -> None:
    tensors = inputs()
    ours = sparse_attention(*tensors, LENGTHS, selection(37), SCALE)
    assert torch.allclose(ours, packed_attention(*tensors, LENGTHS, scale=SCALE).flatten(1))


def test_scores_are_not_saved() -> None:
    saved: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    tensors, chosen = inputs(), selection(4)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        sparse_attention(*tensors, LENGTHS, [keys.clamp(max=0) for keys in chosen], SCALE)
    assert max(saved, default=0) < 3 * 37 * 37
