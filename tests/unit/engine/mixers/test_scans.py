"""The scans equal the recurrences of each sample, token by token: values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from isthmus.engine.mixers import selective_scan as mamba1
from isthmus.engine.mixers import state_space_scan as mamba2
from isthmus.engine.mixers.selective_scan import selective_scan
from isthmus.engine.mixers.state_space_scan import state_space_scan

Scan = Callable[..., Tensor]
LENGTHS = [(23,), (1, 7, 2, 12, 1), (8, 8, 1), (1, 1, 1, 1, 1)]
"""With chunks of 4 tokens: within a chunk, at its edge, over several, and several samples in a chunk."""


def recurrence(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """Of heads [T, H, P] with a state [P, N] each, or of channels [T, C] with a state [N] each."""
    if x.dim() == 3:
        b, c = (item.repeat_interleave(x.size(1) // item.size(1), dim=1)[:, :, None] for item in (b, c))
        dt, a = dt[..., None], a[:, None, None]
    else:
        b, c = b[:, None], c[:, None]
    result, token = [], 0
    for length in lengths:
        state: Tensor | float = 0.0
        for _ in range(length):
            state = (dt[token, ..., None] * a).exp() * state + (dt[token] * x[token])[..., None] * b[token]
            result.append((state * c[token]).sum(-1))
            token += 1
    return torch.stack(result) + x * (d[:, None] if x.dim() == 3 else d)


def inputs(tokens: int, *, heads: bool, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = [(6, 3), (6,), (6,), (2, 5), (2, 5)] if heads else [(6,), (6,), (6, 4), (4,), (4,)]
    x, dt, a, b, c = (torch.randn(*((tokens,) if at != 2 else ()), *shape) for at, shape in enumerate(shapes))
    wide = torch.promote_types(dtype, torch.float32)
    tensors = [x.to(dtype), dt.exp().to(wide), -a.exp().to(wide), b.to(dtype), c.to(dtype)]
    return [tensor.requires_grad_() for tensor in [*tensors, torch.randn(6).to(wide)]]


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize(("scan", "heads"), [(state_space_scan, True), (selective_scan, False)])
def test_values_and_gradients(
    scan: Scan, heads: bool, lengths: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mamba2, "CHUNK", 4)
    monkeypatch.setattr(mamba1, "_BLOCK", 4)
    leaves = inputs(sum(lengths), heads=heads)
    result, expected = scan(*leaves, lengths), recurrence(*leaves, lengths)
    assert torch.allclose(result, expected, rtol=1e-10, atol=1e-10)
    upstream = torch.randn_like(expected)
    gradients = zip(
        torch.autograd.grad(result, leaves, upstream), torch.autograd.grad(expected, leaves, upstream), strict=True
    )
    assert all(torch.allclose(ours, theirs, rtol=1e-10, atol=1e-10) for ours, theirs in gradients)


@pytest.mark.parametrize(("scan", "heads"), [(state_space_scan, True), (selective_scan, False)])
def test_chunks_do_not_change_the_result(scan: Scan, heads: bool) -> None:
    lengths = (300, 5, 140)
    leaves = inputs(sum(lengths), heads=heads)
    assert torch.allclose(scan(*leaves, lengths), recurrence(*leaves, lengths), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("scan", "heads"), [(state_space_scan, True), (selective_scan, False)])
def test_bf16_inputs_are_computed_in_float32(scan: Scan, heads: bool) -> None:
    leaves = inputs(40, heads=heads, dtype=torch.bfloat16)
    result = scan(*leaves, (10, 30))
    assert result.dtype == torch.float32
    assert torch.equal(result, scan(*(leaf.float() for leaf in leaves), (10, 30)))
    grads = torch.autograd.grad(result.sum(), leaves)
    assert [grad.dtype for grad in grads] == [leaf.dtype for leaf in leaves]


def test_large_decays_do_not_overflow() -> None:
    x, dt, a, b, c, d = inputs(50, heads=True, dtype=torch.float32)
    result = state_space_scan(x, dt * 100, a * 100, b, c, d, (50,))
    assert result.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(result.sum(), [x, dt, a, b, c]))
