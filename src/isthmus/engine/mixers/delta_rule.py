"""The gated delta rule over packed samples, in plain PyTorch and in chunks.

A head has a state S [Dk, Dv]. A token with query q, key k, value v, log decay g and learning rate b changes and reads
it:

    S = exp(g) * S;  S = S + k (b * (v - k S));  output = q S / sqrt(Dk)

The decay is one number per head (Gated DeltaNet, arXiv 2412.06464) or one per channel of the key (Kimi Delta Attention,
arXiv 2510.26692). Within a chunk the updates are one triangular system (arXiv 2406.06484, section 3), so that all work
is in matmuls, and only the states of the chunks follow each other. A chunk may have tokens of several samples: pairs of
tokens of different samples have weight 0, so samples need no padding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from isthmus.engine.mixers.causal_convolution import sample_positions

CHUNK = 64
"""Tokens of a chunk; a power of 2."""


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, lengths: Sequence[int]
) -> Tensor:
    """Outputs [T, N, Dv] and states are float32, or float64 if the values are.

    Args:
        q: queries of unit length, [T, N, Dk].
        k: keys of unit length, [T, N, Dk].
        v: values, [T, N, Dv].
        log_decay: at most 0, [T, N, 1] or, per channel, [T, N, Dk].
        beta: learning rates, [T, N].
        lengths: tokens of each sample, T in all.
    """
    return _scan(q, k, v, log_decay, beta, lengths)[0]


def sample_delta_rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """:func:`gated_delta_rule` of one sample, and the state [N, Dk, Dv] after it."""
    return _scan(q, k, v, log_decay, beta, (v.size(0),))


def delta_rule_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor) -> Tensor:
    """One token of n sequences: outputs [n, N, Dv]. Updates their states [n, N, Dk, Dv].

    Other arguments are those of :func:`gated_delta_rule`, with n in the place of T.
    """
    q, k, v, log_decay, beta = (x.to(state.dtype) for x in (q, k, v, log_decay, beta))
    state.mul_(log_decay.exp()[..., None])
    new = beta[..., None, None] * (v[:, :, None] - k[:, :, None] @ state)
    state.addcmul_(k[..., None], new)
    return (q[:, :, None] * q.size(-1) ** -0.5 @ state)[:, :, 0]


def _scan(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Outputs [T, N, Dv], and the state after the last token, which the zeros that fill a chunk do not change."""
    dtype = torch.promote_types(v.dtype, torch.float32)
    tokens = v.size(0)
    size = min(CHUNK, 1 << (tokens - 1).bit_length())
    q, k, v, log_decay, beta = (_chunks(x.to(dtype), size) for x in (q, k, v, log_decay, beta[..., None]))
    q = q * q.size(-1) ** -0.5
    samples = (sample_positions(tuple(lengths), v.device) == 0).cumsum(0)
    same, continues, lasts = _within_samples(samples, size, dtype)
    # Since the start of the chunk; in float64, because differences of large sums would have few digits.
    total = log_decay.double().cumsum(-2)
    from_start = total.to(dtype).exp() * continues
    to_end = (total[..., -1:, :] - total).to(dtype).exp() * lasts
    with_queries, with_keys = _pairs(torch.stack((q, k * beta)), k, total) * same
    # Each token corrects its value by what the keys before it in the chunk, and the state, already return for its key.
    targets = torch.cat((v * beta, k * beta * from_start), dim=-1)
    corrected = torch.linalg.solve_triangular(with_keys.tril(-1), targets, upper=False, unitriangular=True)
    values, state_keys = corrected.split((v.size(-1), k.size(-1)), dim=-1)
    chunks = zip(
        *(x.unbind() for x in (values, state_keys, q * from_start, with_queries, (k * to_end).mT)),
        from_start[..., -1, :, None].unbind(),
        strict=True,
    )
    state, outputs = values.new_zeros(v.size(1), k.size(-1), v.size(-1)), []
    for chunk_values, chunk_keys, queries, pairs, keys_to_end, decay in chunks:
        new = chunk_values - chunk_keys @ state
        outputs.append(queries @ state + pairs @ new)
        state = state * decay + keys_to_end @ new
    return torch.stack(outputs).transpose(1, 2).flatten(0, 1)[:tokens], state


def _chunks(x: Tensor, size: int) -> Tensor:
    """[T, N, D] -> [chunks, N, size, D]; the last chunk is filled with zeros, which change no state."""
    x = F.pad(x, (0, 0, 0, 0, 0, -x.size(0) % size))
    return x.unflatten(0, (-1, size)).transpose(1, 2)


def _within_samples(samples: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """1 where a state passes and 0 elsewhere: from a token to a later one of the chunk, [chunks, 1, size, size]; from
    the chunk before to a token, and from a token to the next chunk, [chunks, 1, size, 1].
    """
    samples = torch.cat((samples, samples[-1:].expand(-samples.numel() % size))).view(-1, size)
    same = (samples[:, :, None] == samples[:, None, :]).tril()
    before = torch.cat((samples.new_full((1,), -1), samples[:-1, -1]))
    ends = (samples == before[:, None], samples == samples[:, -1:])
    continues, lasts = (end.to(dtype)[:, None, :, None] for end in ends)
    return same.to(dtype)[:, None], continues, lasts


def _pairs(rows: Tensor, keys: Tensor, total: Tensor) -> Tensor:
    """Products of rows [2, ..., C, D] and earlier keys [..., C, D] with the decay between them, [2, ..., C, C].

    ``total`` is the float64 sum of log decays since the start of the chunk, [..., C, 1] or [..., C, D]. No exponent is
    positive, so that nothing overflows; products with later keys are finite and have no meaning.
    """
    if total.size(-1) == 1:
        between = (total - total.mT).to(keys.dtype).tril()  # 0 for later keys
        return rows @ keys.mT * between.exp()
    half = keys.size(-2) // 2
    if half == 0:
        return (rows * keys).sum(-1, keepdim=True)
    # Rows of the second half and keys of the first one decay to and from the boundary between them.
    boundary = total[..., half - 1 : half, :]
    later = rows[..., half:, :] * (total[..., half:, :] - boundary).to(keys.dtype).exp()
    crossing = later @ (keys[..., :half, :] * (boundary - total[..., :half, :]).to(keys.dtype).exp()).mT
    halves = (x.unflatten(-2, (2, half)) for x in (rows, keys, total))
    first, second = _pairs(*halves).unbind(-3)
    top = F.pad(first, (0, half))
    return torch.cat((top, torch.cat((crossing, second), dim=-1)), dim=-2)
