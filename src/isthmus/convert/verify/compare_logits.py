"""Whether two models on the disk say the same: both are run in float32 on the same tokens.

A Hugging Face folder is run by transformers, a Megatron checkpoint by Megatron-Core, so that of the two each judges the
other's arithmetic and reading of the config, and the weights besides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from isthmus.convert.open_model import Stored
from isthmus.convert.stream import Progress
from isthmus.convert.verify.layerwise import run
from isthmus.convert.verify.model_runner import float32_bytes, judges, memory_plan, opened_network
from isthmus.convert.verify.probe_tokens import random_samples, sample_lengths
from isthmus.errors import UsageError

TOLERANCE = 1e-4
_ROWS = 64
"""Of logits, so many rows are in float64 at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogitsCheck:
    """What is asked of a comparison."""

    tolerance: float = TOLERANCE
    """Largest absolute difference of a logit that counts as none."""
    tokens: int | None = None
    """Length of a sample; None is 64, or as many positions as there are."""
    by_layer: bool = False
    """Read the weights layer by layer even if there is memory for all of them."""


@dataclass(frozen=True, slots=True)
class LogitsCompared:
    """How far the logits of two models are apart."""

    max_abs: float
    mean_kl_nats: float
    """Kullback-Leibler divergence of the second model's next token from the first's, mean over the tokens."""
    tolerance: float
    where: str
    """The first layer after which hidden states differ, in words; empty if the logits do not."""
    how: str
    """What was run, in words."""

    @property
    def same(self) -> bool:
        """Whether no logit differs by more than the tolerance; one that is no number does."""
        return self.max_abs <= self.tolerance

    def __str__(self) -> str:
        """For the user, without a full stop."""
        by = f"by {self.max_abs:.3g} at most (tolerance {self.tolerance:g}) and {self.mean_kl_nats:.3g} nats a token"
        return (
            f"their logits agree, {by} ({self.how})"
            if self.same
            else f"their logits differ {by}; {self.where} ({self.how})"
        )


@torch.no_grad()
def compare_logits(
    a: Stored, b: Stored, check: LogitsCheck, progress: Progress = lambda done, total: None
) -> LogitsCompared:
    """Run both models on the same random tokens and compare what they say.

    Args:
        a: the first model.
        b: the second, with as many tokens in its vocabulary.
        check: what counts as the same, and how to run them.
        progress: told the bytes of weights that have been used, and will be, as float32.

    Raises:
        UsageError: one of them cannot be run, or their vocabularies are not alike, or there is no memory for a layer.
        DataError: the weights are not what transformers wants.
    """
    if a.arch.vocab_size != b.arch.vocab_size:
        raise UsageError(
            f"vocabularies of {a.arch.vocab_size} and {b.arch.vocab_size} tokens have no logits in common. "
            "Leave --logits out."
        )
    by_layer, why = memory_plan(a, b, by_layer=check.by_layer)
    nbytes = [sum(float32_bytes(side).values()) for side in (a, b)]
    lengths, unreached = sample_lengths(a.arch, b.arch, max(nbytes) // 4, check.tokens)
    samples = random_samples(a.arch.vocab_size, lengths)
    total = len(samples) * sum(nbytes)
    done = 0.0

    def runs(side: Stored, size: int, look: Callable[[int, int, Tensor], None]) -> list[Tensor]:
        found = []
        with opened_network(side, by_layer=by_layer) as network:
            step = size / (len(network.layers) + 1)
            for number, sample in enumerate(samples):

                def seen(passed: int, hidden: Tensor, number: int = number) -> None:
                    nonlocal done
                    look(number, passed, hidden)
                    done += step
                    progress(round(done), total)

                found.append(run(network, sample, seen, by_layer=by_layer))
        return found

    kept: dict[tuple[int, int], Tensor] = {}
    apart: list[int] = []

    def keep(number: int, passed: int, hidden: Tensor) -> None:
        kept[number, passed] = hidden.clone()

    def compare(number: int, passed: int, hidden: Tensor) -> None:
        before = kept.pop((number, passed), None)
        if before is None or _differ(before, hidden, check.tolerance):
            apart.append(passed)

    pairs = list(zip(runs(a, nbytes[0], keep), runs(b, nbytes[1], compare), strict=True))
    max_abs = torch.stack([(one - other).abs().max() for one, other in pairs]).max().item()
    kl = sum(_kl(one, other) for one, other in pairs) / sum(sample.numel() for sample in samples)
    counted = f"{lengths[0]}" if lengths[0] == lengths[1] else f"{lengths[0]} and {lengths[1]}"
    how = f"fp32, {judges(a, b)}, 2 samples of {counted} tokens, {why}{unreached}"
    where = "" if max_abs <= check.tolerance else _where(apart, a.arch.num_layers)
    return LogitsCompared(max_abs, kl, check.tolerance, where, how)


def _differ(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Whether hidden states are apart, measured by the largest of them, which may be in the thousands."""
    if one.shape != other.shape:
        return True
    return not (one - other).abs().max().item() <= tolerance * max(1.0, one.abs().max().item())


def _kl(one: Tensor, other: Tensor) -> float:
    """Divergence of the distributions of logits [T, V] in nats, summed over T."""
    total = 0.0
    for p, q in zip(one.split(_ROWS), other.split(_ROWS), strict=True):
        log_p, log_q = p.double().log_softmax(-1), q.double().log_softmax(-1)
        total += (log_p.exp() * (log_p - log_q)).sum(-1).clamp(min=0).sum().item()
    return total


def _where(apart: Sequence[int], num_layers: int) -> str:
    if not apart:
        return f"hidden states agree after each of {num_layers} layers, so look at the final norm and the output layer"
    if min(apart) == 0:
        return "hidden states differ before the first layer"
    return f"the first layer after which hidden states differ is {min(apart) - 1} (of 0 to {num_layers - 1})"
