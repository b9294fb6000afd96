"""The recurrence of Mamba-1 over packed samples, token by token (arXiv 2312.00752, section 3.2)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from isthmus.engine.mixers.causal_convolution import sample_positions

_BLOCK = 64
"""Tokens whose states are in memory at a time."""


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, lengths: tuple[int, ...]
) -> Tensor:
    """``y[t] = state[t] @ c[t] + d * x[t]`` of each channel.

    The state is ``state[t] = exp(dt[t] a) * state[t-1] + dt[t] x[t] b[t]``, and zero before a sample. Computed in at
    least float32. Saves its inputs and the state before each block of tokens for the backward pass, which computes the
    states again.

    Args:
        x: [T, C], the samples of a packed sequence.
        dt: [T, C], float32, not negative.
        a: [C, N], float32, negative.
        b: [T, N], of all channels.
        c: [T, N].
        d: [C], float32.
        lengths: tokens of each sample, T in all.

    Returns:
        [T, C] in at least float32.
    """
    return _SelectiveScan.apply(x, dt, a, b, c, d, sample_positions(lengths, x.device) == 0)  # type: ignore[no-any-return]


class _SelectiveScan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, first: Tensor) -> Tensor:
        out, states = _scan(x, dt, a, b, c, d, first)
        ctx.save_for_backward(x, dt, a, b, c, d, first, torch.stack(states[:-1]))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, dt, a, b, c, d, first, first_states = ctx.saved_tensors
        grad_inputs = [torch.empty_like(tensor) for tensor in (x, dt, b, c)]
        grad_a, carried = torch.zeros_like(a), torch.zeros_like(a)
        for index in reversed(range(len(first_states))):
            rows = slice(index * _BLOCK, (index + 1) * _BLOCK)
            block_x, block_dt, block_b, block_c = (tensor[rows].to(dt.dtype) for tensor in (x, dt, b, c))
            states, decay = _states(block_x, block_dt, a, block_b, first[rows], first_states[index])
            grad_states = grads[0][rows, :, None] * block_c[:, None]
            for token in reversed(range(len(decay))):
                carried = grad_states[token].add_(carried) * decay[token]
            before = torch.cat((first_states[index][None], states[:-1]))
            # Of dt * a; a reset state has no decay and no gradient.
            grad_exponent = grad_states * before * decay
            grad_scaled = (grad_states @ block_b[..., None])[..., 0]
            grad_a += torch.einsum("tcn,tc->cn", grad_exponent, block_dt)
            grad_inputs[0][rows] = grad_scaled * block_dt + grads[0][rows] * d
            grad_inputs[1][rows] = grad_scaled * block_x + (grad_exponent * a).sum(-1)
            grad_inputs[2][rows] = torch.einsum("tcn,tc->tn", grad_states, block_x * block_dt)
            grad_inputs[3][rows] = torch.einsum("tcn,tc->tn", states, grads[0][rows])
        grad_d = (grads[0] * x).sum(0)
        return grad_inputs[0], grad_inputs[1], grad_a, grad_inputs[2], grad_inputs[3], grad_d, None


def _scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, first: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Outputs [T, C], and the states [C, N] before each block of tokens and after the last one."""
    out, block_states = torch.empty_like(dt), [torch.zeros_like(a)]
    for start in range(0, len(x), _BLOCK):
        rows = slice(start, start + _BLOCK)
        states, _ = _states(x[rows], dt[rows], a, b[rows], first[rows], block_states[-1])
        out[rows] = (states @ c[rows].to(dt.dtype)[..., None])[..., 0]
        block_states.append(states[-1].clone())
    return out.add_(x.to(dt.dtype) * d), block_states


def sample_scan(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, a: Tensor, d: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`selective_scan` of one sample, without gradients, and the state [C, N] after it."""
    out, states = _scan(x, dt, a, b, c, d, torch.arange(len(x), device=x.device) == 0)
    return out, states[-1]


def scan_step(x: Tensor, dt: Tensor, b: Tensor, c: Tensor, state: Tensor, a: Tensor, d: Tensor) -> Tensor:
    """One token of n sequences: outputs [n, C]. Updates their states [n, C, N].

    Arguments are those of :func:`selective_scan`, with n in the place of T.
    """
    wide_x, b, c = (tensor.to(dt.dtype) for tensor in (x, b, c))
    state.mul_((dt[..., None] * a).exp_()).addcmul_((dt * wide_x)[..., None], b[:, None])
    return (state @ c[..., None])[..., 0] + wide_x * d


def _states(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, first: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
    """The states of a block of tokens, [L, C, N], and the factors of the states before them."""
    decay = (dt[..., None] * a).exp_().masked_fill_(first[:, None, None], 0)
    states = (dt * x)[..., None] * b.to(dt.dtype)[:, None]
    for token in range(len(states)):
        before = states[token].addcmul_(decay[token], before)
    return states, decay
