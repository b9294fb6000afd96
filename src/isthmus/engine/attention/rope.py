"""Rotary position embeddings of packed samples.

Frequencies follow RoFormer (arXiv 2104.09864); ``llama3`` scaling is that of Llama 3.1, with all four constants from
the model's config (Megatron-Core hard-codes three of them). YaRN is that of arXiv 2309.00071, section 3.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isthmus.data.batching.packed_batch import PackedBatch
from isthmus.engine.compiled import compiled_on_gpu, compiles
from isthmus.engine.parallel.context_parallel import local_tokens
from isthmus.families.architecture import Architecture
from isthmus.families.blocks.attention import Attention
from isthmus.families.blocks.rotary import RopeScaling, Rotary


def frequency_sets(architecture: Architecture) -> Tensor:
    """All frequencies of the model, float32, joined: R / 2 for each set, for R rotated channels of a head.

    A set for each kind of attention with its own rotation, and a second one for samples beyond the original context
    (LongRoPE).
    """
    joined = torch.cat([frequencies for kind in architecture.rotary_kinds for frequencies in _sets(kind)])
    return -joined if architecture.rotary.rotary_reversed else joined


def _sets(attention: Attention) -> list[Tensor]:
    rotary, width = attention.rotary, attention.rotary_width
    assert rotary is not None
    scaling = rotary.rope_scaling
    if scaling is None or scaling.kind != "longrope":
        return [inverse_frequencies(rotary, width)]
    long = replace(rotary, rope_scaling=replace(scaling, short_factor=scaling.long_factor))
    return [inverse_frequencies(rotary, width), inverse_frequencies(long, width)]


def rotary_columns(architecture: Architecture, attention: Attention) -> slice | None:
    """The columns of :func:`rotary_tables` for a layer with this attention; None: all."""
    first, *windowed = (kind.rotary_width for kind in architecture.rotary_kinds)
    if not windowed:
        return None
    return slice(first) if attention.window is None else slice(first, None)


def inverse_frequencies(rotary: Rotary, width: int) -> Tensor:
    """Angle per position of each pair of ``width`` rotated channels, float32 [``width`` / 2]."""
    exponent = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    scaling, base = rotary.rope_scaling, rotary.rotary_base
    if scaling is not None and scaling.kind == "ntk_alpha":
        base *= scaling.factor ** (width / (width - 2))
    frequencies = 1.0 / (base**exponent)
    if scaling is None or scaling.kind in ("ntk_alpha", "dynamic"):
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "proportional":
        rotated = int(scaling.partial_rotary_factor * width // 2)
        return torch.where(torch.arange(width // 2) < rotated, frequencies / scaling.factor, 0.0)
    if scaling.kind == "yarn":
        return _yarn(frequencies, scaling, base)
    if scaling.kind == "longrope":
        return frequencies / torch.tensor(scaling.short_factor)
    return _llama3(frequencies, scaling)


def magnitude(scaling: RopeScaling | None) -> float:
    """Factor of cosines and sines (arXiv 2309.00071, section 3.4; arXiv 2402.13753, section 3.3)."""
    if scaling is None or scaling.kind not in ("yarn", "longrope"):
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    if scaling.kind == "longrope":
        length = scaling.original_max_position_embeddings
        return math.sqrt(1 + math.log(scaling.factor) / math.log(length)) if scaling.factor > 1 else 1.0
    if scaling.mscale and scaling.mscale_all_dim:
        return yarn_mscale(scaling.factor, scaling.mscale) / yarn_mscale(scaling.factor, scaling.mscale_all_dim)
    return yarn_mscale(scaling.factor)


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """YaRN's ``mscale`` for a context extended by ``factor``."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(frequencies: Tensor, scaling: RopeScaling, base: float) -> Tensor:
    pairs = frequencies.numel()

    def pair_with(times: float) -> float:
        """Index of the pair with this many rotations within the original length."""
        return pairs * math.log(scaling.original_max_position_embeddings / (times * 2 * math.pi)) / math.log(base)

    low, high = pair_with(scaling.beta_fast), pair_with(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * pairs - 1)
    high += 0.001 if low == high else 0
    stretched = ((torch.arange(pairs, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * stretched + frequencies * (1 - stretched)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    wavelength = 2 * math.pi / frequencies
    longest = scaling.original_max_position_embeddings / scaling.low_freq_factor
    shortest = scaling.original_max_position_embeddings / scaling.high_freq_factor
    share_kept = (scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - share_kept) * frequencies / scaling.factor + share_kept * frequencies
    stretched = torch.where(wavelength > longest, frequencies / scaling.factor, blended)
    return torch.where(wavelength < shortest, frequencies, stretched)


def rotary_tables(architecture: Architecture, sets: Tensor, batch: PackedBatch, dtype: torch.dtype) -> Tensor:
    """The :func:`rotation_table` of a packed batch, [T, R], with the :func:`frequency_sets` of the model.

    The table of layers with a window comes last if they are rotated otherwise; see :func:`rotary_columns`.
    """
    tables = []
    for kind in architecture.rotary_kinds:
        assert kind.rotary is not None
        scaling, pairs = kind.rotary.rope_scaling, kind.rotary_width // 2
        frequencies, sets = sets[:pairs], sets[pairs:]
        if scaling is not None and scaling.kind in ("longrope", "dynamic"):
            samples = torch.tensor(batch.lengths, device=batch.position_ids.device)
            if scaling.kind == "longrope":
                frequencies, sets = torch.stack((frequencies, sets[:pairs])), sets[pairs:]
                chosen = (samples > scaling.original_max_position_embeddings).long()
            else:
                frequencies, chosen = _of_lengths(frequencies, samples, scaling), torch.arange(len(batch.lengths))
            frequencies = frequencies[local_tokens(chosen.to(samples).repeat_interleave(samples), batch.spans)]
        tables.append(rotation_table(frequencies, batch.position_ids, dtype, magnitude=magnitude(scaling)))
    return tables[0] if len(tables) == 1 else torch.cat(tables, dim=-1)


def _of_lengths(frequencies: Tensor, lengths: Tensor, scaling: RopeScaling) -> Tensor:
    """The frequencies of samples of these lengths [n] with ``dynamic`` scaling: float32 [n, R / 2]."""
    pairs = frequencies.numel()
    beyond = (lengths / scaling.original_max_position_embeddings).clamp(min=1)
    stretch = scaling.factor * beyond - (scaling.factor - 1)
    exponent = torch.arange(pairs, device=lengths.device) / max(pairs - 1, 1)  # of R / (R - 2) times 2 i / R
    return frequencies * stretch[:, None] ** -exponent


def rotation_table(frequencies: Tensor, position_ids: Tensor, dtype: torch.dtype, *, magnitude: float = 1.0) -> Tensor:
    """Cosines and sines of each position, times ``magnitude``: [T, R].

    ``frequencies`` are float32 [R / 2], or [T, R / 2] per token. The result is one tensor, so that
    activation recomputation can pass it on.
    """
    angles = position_ids[:, None].float() * frequencies
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    return (table if magnitude == 1 else table.mul_(magnitude)).to(dtype)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(table)
        ctx.interleaved = interleaved
        return _rotated(x, table, interleaved, inverse=False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        # The transpose of a rotation is the rotation by the opposite angle.
        (table,) = ctx.saved_tensors
        return _rotated(grads[0], table, ctx.interleaved, inverse=True), None, None


def _rotated(x: Tensor, table: Tensor, interleaved: bool, *, inverse: bool) -> Tensor:
    if compiles(x):  # the compiler has no operations with strided outputs
        return _rotated_region(x, table, interleaved, inverse)
    width = table.size(-1)
    cos, sin = table.view(table.size(0), *(1,) * (x.dim() - 2), -1).chunk(2, dim=-1)
    first, second = _pairs(x, width, interleaved)
    out = _empty_heads(x)
    out_first, out_second = _pairs(out, width, interleaved)
    sign = -1 if inverse else 1
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin, value=sign)
    if width < x.size(-1):
        out[..., width:] = x[..., width:]
    return out


def _empty_heads(x: Tensor) -> Tensor:
    """An empty tensor of the shape of ``x`` in the memory layout of its attention."""
    if x.device.type != "cpu":
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    # The matmuls of packed_attention need heads outermost.
    return torch.empty(x.size(1), x.size(0), *x.shape[2:], dtype=x.dtype).transpose(0, 1)


@compiled_on_gpu
def _rotated_region(x: Tensor, table: Tensor, interleaved: bool, inverse: bool) -> Tensor:
    return rotated_out_of_place(x, table, interleaved, inverse=inverse)


def rotated_out_of_place(x: Tensor, table: Tensor, interleaved: bool, *, inverse: bool) -> Tensor:
    """:func:`rotate`, or the rotation by the opposite angles, for a compiled region."""
    width = table.size(-1)
    cos, sin = table.view(table.size(0), *(1,) * (x.dim() - 2), -1).chunk(2, dim=-1)
    sin = -sin if inverse else sin
    first, second = _pairs(x, width, interleaved)
    rotated = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.stack(rotated, dim=-1).flatten(-2) if interleaved else torch.cat(rotated, dim=-1)
    return torch.cat((joined, x[..., width:]), dim=-1)


def _pairs(x: Tensor, width: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    rotated = x[..., :width]
    if interleaved:
        return rotated[..., 0::2], rotated[..., 1::2]
    first, second = rotated.chunk(2, dim=-1)
    return first, second


def rotate(x: Tensor, table: Tensor, *, interleaved: bool = False) -> Tensor:
    """Rotate the first R channels of ``x`` [T, G, ..., D] in pairs, by the angles in ``table`` [T, R].

    A pair is (channel i, channel i + R / 2), or two adjacent channels if ``interleaved``.
    """
    if not torch.is_grad_enabled():
        return _rotated(x, table, interleaved, inverse=False)
    return _Rotate.apply(x, table, interleaved)


def rotation_factors(table: Tensor) -> tuple[Tensor, Tensor]:
    """Factors [T, 1, 1, R] of each channel and of the other one of its pair, of a :func:`rotation_table` [T, R]."""
    cos, sin = table.chunk(2, dim=-1)
    return torch.cat((cos, cos), dim=-1)[:, None, None], torch.cat((-sin, sin), dim=-1)[:, None, None]


def rotate_all_channels(x: Tensor, factors: tuple[Tensor, Tensor]) -> Tensor:
    """:func:`rotate` of ``x`` [T, G, N, R] in 3 operations, with a copy of ``x``; without gradients."""
    channel, other = factors
    return (x * channel).addcmul_(x.roll(x.size(-1) // 2, -1), other)
