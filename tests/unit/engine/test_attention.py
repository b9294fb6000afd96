"""Attention over packed samples against the formula written out, and what it must not allocate."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from isthmus.engine.attention import Segments, VarlenAttention
from unit.engine.recorder import Recorder

HEADS, CHANNELS = 4, 16


def attention(window: int | None) -> VarlenAttention:
    return VarlenAttention(SimpleNamespace(window_size=None if window is None else (window - 1, 0)))


def inputs(tokens: int, groups: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(tokens, heads, CHANNELS, dtype=dtype) for heads in (HEADS, groups, groups))
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def reference(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], window: int | None) -> Tensor:
    """Every score of the line, then a mask: same sample, not later, not too long ago."""
    sample = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    place = torch.arange(len(sample))
    distance = place[:, None] - place[None, :]
    seen = (sample[:, None] == sample[None, :]) & (distance >= 0)
    if window is not None:
        seen &= distance < window
    share = q.size(1) // k.size(1)
    k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
    scores = torch.einsum("tnd,snd->nts", q, k) / CHANNELS**0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return torch.einsum("nts,snd->tnd", weights, v).flatten(1)


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 3, 8, 100])
@pytest.mark.parametrize("lengths", [(20,), (9, 1, 4, 6), (8, 12), (1, 1, 18)])
def test_values_and_gradients(lengths: tuple[int, ...], window: int | None, groups: int) -> None:
    given = inputs(20, groups)
    upstream = torch.randn(20, HEADS * CHANNELS, dtype=torch.float64)
    out, wanted = attention(window)(*given, Segments(lengths)), reference(*given, lengths, window)
    assert torch.allclose(out, wanted)
    got = torch.autograd.grad(out, given, upstream)
    for mine, theirs in zip(got, torch.autograd.grad(wanted, given, upstream), strict=True):
        assert torch.allclose(mine, theirs)


@pytest.mark.parametrize("window", [None, 8])
def test_shared_keys_and_values_are_not_copied_for_each_head(window: int | None) -> None:
    q, k, v = inputs(40, 2, torch.float32)
    with Recorder() as seen:
        attention(window)(q, k, v, Segments((30, 10)))
    kernels = [shapes for name, shapes in seen.taken if "scaled_dot_product" in name]
    assert len(kernels) == 2
    for _, key, value, *_ in kernels:
        assert key[1] == value[1] == 2
    assert not {name for name, _ in seen.taken} & {"repeat", "repeat_interleave", "expand", "clone"}


def test_no_square_of_the_line_is_made() -> None:
    q, k, v = inputs(512, 2, torch.float32)
    with Recorder() as seen:
        attention(None)(q, k, v, Segments((500, 12))).sum().backward()
    assert seen.largest(torch.float32) <= 512 * HEADS * CHANNELS < 500 * 500
    assert seen.largest(torch.bool) == 0


def test_a_window_longer_than_the_sample_needs_no_mask() -> None:
    given = inputs(40, 2, torch.float32)
    with Recorder() as seen:
        attention(30)(*given, Segments((30, 10)))
    assert seen.largest(torch.bool) == 0


def test_one_sample_does_not_change_another() -> None:
    q, k, v = (tensor.detach() for tensor in inputs(20, 2))
    before = attention(None)(q, k, v, Segments((8, 12)))
    for tensor in (q, k, v):
        tensor[:8] = torch.randn_like(tensor[:8])
    after = attention(None)(q, k, v, Segments((8, 12)))
    assert torch.equal(before[8:], after[8:])
    assert not torch.allclose(before[:8], after[:8])


def test_lengths_must_cover_the_line() -> None:
    with pytest.raises(RuntimeError):
        attention(None)(*inputs(20, 2), Segments((8, 11)))
