"""The chunked delta rule equals the recurrence, sample by sample."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from isthmus.engine.mixers.delta_rule import gated_delta_rule

HEADS, KEYS, VALUES = 2, 6, 5
LENGTHS = {
    "one token": (1,),
    "one chunk": (64,),
    "several chunks": (150,),
    "samples in chunks": (3, 1, 40, 90, 2, 5, 64, 1),
    "many short samples": (2,) * 70,
}


def recurrence(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
    """The definition, for one sample."""
    state, outputs = v.new_zeros(q.size(1), q.size(2), v.size(2)), []
    for token in range(q.size(0)):
        state = state * log_decay[token].exp()[..., None]
        wrong = v[token] - (state * k[token, ..., None]).sum(-2)
        state = state + k[token, ..., None] * (wrong * beta[token, :, None])[:, None]
        outputs.append((state * q[token, ..., None]).sum(-2) * q.size(2) ** -0.5)
    return torch.stack(outputs)


def inputs(tokens: int, channels: int, dtype: torch.dtype, decay: float = 1.0) -> list[Tensor]:
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(tokens, HEADS, *shape, generator=random, dtype=torch.float64)

    q, k = (F.normalize(draw(KEYS), dim=-1) for _ in range(2))
    results = [q, k, draw(VALUES), -decay * F.softplus(draw(channels)), 2 * draw().sigmoid()]
    return [x.to(dtype).requires_grad_() for x in results]


@pytest.mark.slow_cases(
    "samples in chunks-decay of a head-torch.float32-2e-05",
    "samples in chunks-decay of a channel-torch.float64-1e-12",
    "samples in chunks-decay of a channel-torch.float32-2e-05",
)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-5)], ids=str)
@pytest.mark.parametrize("channels", [1, KEYS], ids=["decay of a head", "decay of a channel"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_values_and_gradients(lengths: tuple[int, ...], channels: int, dtype: torch.dtype, tolerance: float) -> None:
    tensors = inputs(sum(lengths), channels, dtype)
    exact = [x.detach().double().requires_grad_() for x in tensors]
    upstream = torch.randn(sum(lengths), HEADS, VALUES, generator=torch.Generator().manual_seed(1)).double()
    ours = gated_delta_rule(*tensors, lengths)
    theirs = torch.cat([recurrence(*sample) for sample in zip(*(x.split(lengths) for x in exact), strict=True)])
    assert ours.dtype == dtype
    grads = torch.autograd.grad(ours, tensors, upstream.to(dtype))
    expected = torch.autograd.grad(theirs, exact, upstream)
    for mine, other in zip((ours, *grads), (theirs, *expected), strict=True):
        assert (mine - other).abs().max() < tolerance * max(1, other.abs().max())


@pytest.mark.parametrize("channels", [1, KEYS])
def test_decays_that_forget_everything_stay_finite(channels: int) -> None:
    tensors = inputs(100, channels, torch.float32, decay=1e4)
    out = gated_delta_rule(*tensors, (30, 70))
    grads = torch.autograd.grad(out.sum(), tensors)
    assert all(x.isfinite().all() for x in (out, *grads))
    q, k, v, _, beta = tensors
    alone = (q * k).sum(-1, keepdim=True) * v * beta[..., None] * KEYS**-0.5
    assert torch.allclose(out, alone, atol=1e-6)


def test_a_sample_does_not_change_with_its_neighbours() -> None:
    q, k, v, g, beta = (x.detach() for x in inputs(90, 1, torch.float64))
    lengths = (20, 30, 40)
    packed = gated_delta_rule(q, k, v, g, beta, lengths)
    v = v.clone()
    v[:20] += 1
    v[50:] += 1
    assert torch.equal(packed[20:50], gated_delta_rule(q, k, v, g, beta, lengths)[20:50])


def test_bfloat16_has_a_float32_state() -> None:
    tensors = [x.detach().bfloat16() for x in inputs(200, 1, torch.float64, decay=1e-3)]
    exact = recurrence(*(x.double() for x in tensors))
    ours = gated_delta_rule(*tensors, (200,))
    assert ours.dtype == torch.float32
    assert (ours - exact).abs().max() < 1e-5 * exact.abs().max()
