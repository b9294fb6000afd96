"""Causal depthwise convolution over packed samples: each sample starts with zeros before its first token."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from isthmus.engine.compiled import compiled_on_gpu
from isthmus.engine.host_copies import to_device


def causal_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, lengths: tuple[int, ...], *, activated: bool = False
) -> Tensor:
    """``out[t, c] = bias[c] + sum_j weight[c, 0, K - 1 - j] * x[t - j, c]`` over the tokens ``t - j`` of t's sample.

    Computed in at least float32 and rounded once. Saves ``x`` for the backward pass.

    Args:
        x: [T, C], the samples of a packed sequence.
        weight: [C, 1, K], that of a torch ``Conv1d`` with C groups.
        bias: [C].
        lengths: tokens of each sample, T in all.
        activated: returns the SiLU of the convolution.
    """
    return _Convolution.apply(x, weight, bias, sample_positions(lengths, x.device), activated)  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=4)  # shared by the layers of a step, forward and backward
def sample_positions(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [T], the number of preceding tokens in each token's sample.

    Positions of a batch may continue across samples.
    """
    sizes = torch.tensor(lengths)
    starts = (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    return to_device((torch.arange(len(starts)) - starts).int(), device)


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, activated: bool) -> Tensor:
        ctx.save_for_backward(x, weight, bias, positions)
        ctx.activated = activated
        return _activated(x, weight, bias, positions, activated)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, positions = ctx.saved_tensors
        trained = ctx.needs_input_grad[1]
        return *_backward(grads[0], x, weight, bias, positions, ctx.activated, trained), None, None


@compiled_on_gpu
def _activated(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, activated: bool) -> Tensor:
    out = _convolved(x, weight, bias, positions)
    return (torch.nn.functional.silu(out) if activated else out).to(x.dtype)


def _convolved(x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    taps = weight[:, 0].to(wide).t().flip(0)  # of the token itself, of the token before it, ...
    x = x.to(wide)
    out = x * taps[0]
    for shift in range(1, min(len(taps), x.size(0))):
        out[shift:].addcmul_(_zeroed_starts(x[:-shift], positions, shift), taps[shift])
    return out if bias is None else out.add_(bias)


def _zeroed_starts(rows: Tensor, positions: Tensor, shift: int) -> Tensor:
    """Zeros for the tokens whose sample starts fewer than ``shift`` tokens before them."""
    return rows.masked_fill((positions[shift:] < shift)[:, None], 0)


@compiled_on_gpu
def _backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, positions: Tensor, activated: bool, trained: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    wide = torch.promote_types(x.dtype, torch.float32)
    grad = grad.to(wide)
    if activated:
        out = _convolved(x, weight, bias, positions)
        grad = grad * (share := out.sigmoid()) * (1 + out * (1 - share))
    taps = weight[:, 0].to(wide).t().flip(0)
    wide_x, grad_x = x.to(wide), grad * taps[0]
    grad_taps = [torch.linalg.vecdot(grad, wide_x, dim=0)] if trained else []
    for shift in range(1, min(len(taps), x.size(0))):
        shifted_grad = _zeroed_starts(grad[shift:], positions, shift)
        grad_x[:-shift].addcmul_(shifted_grad, taps[shift])
        if trained:
            grad_taps.append(torch.linalg.vecdot(shifted_grad, wide_x[:-shift], dim=0))
    grad_bias = None if bias is None or not trained else grad.sum(0).to(bias.dtype)
    if not trained:
        return grad_x.to(x.dtype), None, None
    grad_taps += [torch.zeros_like(grad_taps[0])] * (len(taps) - len(grad_taps))
    return grad_x.to(x.dtype), torch.stack(grad_taps[::-1], dim=1)[:, None].to(weight.dtype), grad_bias
