"""Random tokens to run models on; if cheap, longer than attention windows and original contexts."""

from __future__ import annotations

import torch
from torch import Tensor

from isthmus.errors import UsageError
from isthmus.families.architecture import Architecture

TOKENS = 64
_CHEAP_MULTIPLICATIONS = 10**12
_CHEAP_BYTES = 1 << 28


def sample_lengths(
    a: Architecture, b: Architecture, parameters: int, tokens: int | None
) -> tuple[tuple[int, int], str]:
    """Lengths of two samples that both models can run, and a remark if they are too short.

    The second is longer than any attention window or original context, if that is cheap with so many ``parameters``.
    ``tokens`` is the requested length; None is 64.
    """
    limits = [arch.max_position_embeddings for arch in (a, b) if arch.position == "learned"]
    if limits and tokens is not None and tokens > min(limits):
        raise UsageError(f"--tokens {tokens}: there are {min(limits)} positions. Use {min(limits)} or fewer.")
    short = min([tokens or TOKENS, *limits])
    span = max(_span(arch) for arch in (a, b))
    long = min([span + short, *limits])
    if short > span or long == short:
        return (short, short), ""
    scores = long * max(arch.num_attention_heads for arch in (a, b))
    if parameters * long <= _CHEAP_MULTIPLICATIONS and 4 * long * max(a.vocab_size, scores) <= _CHEAP_BYTES:
        return (short, long), ""
    return (short, short), f"; --tokens {long} would reach beyond the window or original context of {span}"


def _span(arch: Architecture) -> int:
    """The largest attention window or original context."""
    windows = [window for layer in range(arch.num_layers) if (window := arch.window(layer)) is not None]
    scaling = arch.rope_scaling
    contexts = [scaling.original_max_position_embeddings] if scaling is not None and scaling.kind != "linear" else []
    return max([*windows, *contexts], default=0)


def random_samples(vocab_size: int, lengths: tuple[int, int]) -> list[Tensor]:
    """int64 [B, S]; samples of equal length form one batch."""
    generator = torch.Generator().manual_seed(0)
    samples = [torch.randint(0, vocab_size, (1, length), generator=generator) for length in lengths]
    return [torch.cat(samples)] if lengths[0] == lengths[1] else samples
