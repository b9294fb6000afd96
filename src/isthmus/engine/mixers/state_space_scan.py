"""The recurrence of Mamba-2 over packed samples, chunk by chunk (state space duality, arXiv 2405.21060, section 6).

Within a chunk it is a masked matmul, like attention; between chunks a state of each head is passed on.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from isthmus.engine.mixers.causal_convolution import sample_positions

CHUNK = 128
"""Tokens of a chunk."""


def state_space_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    """``y[t] = state[t] @ c[t] + d * x[t]`` of each head.

    The state is ``state[t] = exp(dt[t] a) * state[t-1] + dt[t] x[t] b[t]^T``, and zero before a sample. Computed in at
    least float32. Saves its inputs and the state before each chunk for the backward pass, which computes each chunk
    again.

    Args:
        x: [T, H, P], the samples of a packed sequence.
        dt: [T, H], float32, not negative.
        a: [H], float32, negative.
        b: [T, G, N]; each group belongs to H / G consecutive heads.
        c: [T, G, N].
        d: [H], float32.
        lengths: tokens of each sample, T in all.

    Returns:
        [T, H, P] in at least float32.
    """
    numbers = (sample_positions(lengths, x.device) == 0).cumsum(0)
    return _StateSpaceScan.apply(x, dt, b, c, a, d, numbers)  # type: ignore[no-any-return]


class _StateSpaceScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, numbers: Tensor) -> Tensor:
        out, states = _scan(x, dt, b, c, a, d, numbers)
        ctx.save_for_backward(x, dt, b, c, a, d, numbers, states[:-1])
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, b, c, a, d, numbers, states = ctx.saved_tensors
        grad_inputs = [torch.empty_like(tensor) for tensor in (x, dt, b, c)]
        grad_a, grad_d, grad_state = (torch.zeros_like(tensor) for tensor in (a, d, states[0]))
        for index, (start, end) in reversed(list(enumerate(_chunks(x.size(0))))):
            inputs = [tensor[start:end] for tensor in (x, dt, b, c)] + [a, d, states[index]]
            leaves = [tensor.detach().requires_grad_() for tensor in inputs]
            with torch.enable_grad():
                results = _chunk(leaves, _masks(numbers, start, end))
            *chunk_grads, chunk_grad_a, chunk_grad_d, grad_state = torch.autograd.grad(
                results, leaves, (grads[0][start:end], grad_state)
            )
            grad_a, grad_d = grad_a + chunk_grad_a, grad_d + chunk_grad_d
            for grad_input, part in zip(grad_inputs, chunk_grads, strict=True):
                grad_input[start:end] = part
        return *grad_inputs, grad_a, grad_d, None


def _scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs [T, H, P], and the states [H, P, N] before each chunk and after the last one."""
    chunks = _chunks(x.size(0))
    out = torch.empty_like(x, dtype=dt.dtype)
    states = dt.new_zeros(len(chunks) + 1, *x.shape[1:], b.size(-1))
    for index, (start, end) in enumerate(chunks):
        inputs = [tensor[start:end] for tensor in (x, dt, b, c)] + [a, d, states[index]]
        out[start:end], states[index + 1] = _chunk(inputs, _masks(numbers, start, end))
    return out, states


def sample_scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`state_space_scan` of one sample, without gradients, and the state [H, P, N] after it."""
    out, states = _scan(x, dt, b, c, a, d, torch.ones(len(x), dtype=torch.int64, device=x.device))
    return out, states[-1]


def scan_step(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor, a: Tensor, d: Tensor) -> Tensor:
    """One token of n sequences: outputs [n, H, P]. Updates their states [n, H, P, N].

    Arguments are those of :func:`state_space_scan`, with n in the place of T.
    """
    x = x.to(dt.dtype)
    b, c = (tensor.to(dt.dtype).repeat_interleave(x.size(1) // tensor.size(1), dim=1) for tensor in (b, c))
    state.mul_((dt * a).exp()[..., None, None]).addcmul_((x * dt[..., None])[..., None], b[:, :, None])
    return (state @ c[..., None])[..., 0] + x * d[:, None]


def _chunks(tokens: int) -> list[tuple[int, int]]:
    return list(pairwise([*range(0, tokens, CHUNK), tokens]))


def _masks(numbers: Tensor, start: int, end: int) -> tuple[Tensor, Tensor, Tensor]:
    """Masks of a chunk.

    Pairs of tokens that are not in causal order in one sample; tokens that are not in the sample of the token before
    the chunk; tokens that are not in the sample of its last token.
    """
    samples = numbers[start:end]
    later = torch.ones(len(samples), len(samples), dtype=torch.bool, device=samples.device).triu(1)
    return (
        later | (samples[:, None] != samples),
        samples != numbers[start - 1] if start else samples > 0,
        samples != samples[-1],
    )


def _chunk(inputs: list[Tensor], masks: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Outputs [L, H, P] of the tokens of a chunk, and the state [H, P, N] after it.

    The inputs are those of :func:`state_space_scan` and the state before the chunk.
    """
    x, dt, b, c, a, d, state = inputs
    unrelated, fresh, ended = masks
    groups, width = b.shape[1:]
    wide = dt.dtype
    b, c = b.to(wide).transpose(0, 1), c.to(wide).transpose(0, 1)  # [G, L, N]
    decay = (dt * a).cumsum(0).t()  # [H, L], the logarithm
    scaled = (x.to(wide) * dt[..., None]).transpose(0, 1)  # [H, L, P]
    # Masked before the exponential, which would overflow.
    between = (decay[:, :, None] - decay[:, None]).masked_fill(unrelated, -torch.inf).exp()
    scores = (c @ b.mT)[:, None] * between.unflatten(0, (groups, -1))  # [G, H / G, L, L]
    out = scores.flatten(0, 1) @ scaled
    since = decay.masked_fill(fresh, -torch.inf).exp()  # of the state before the chunk
    carried = c @ state.view(groups, -1, width).mT  # [G, L, H / G * P]
    out = out + carried.unflatten(2, (-1, out.size(-1))).permute(0, 2, 1, 3).flatten(0, 1) * since[..., None]
    until = (decay[:, -1:] - decay).masked_fill(ended, -torch.inf).exp()
    added = (scaled * until[..., None]).unflatten(0, (groups, -1)).transpose(2, 3).flatten(1, 2) @ b
    out = out.transpose(0, 1) + x.to(wide) * d[:, None]
    return out, state * since[:, -1, None, None] + added.view_as(state)
